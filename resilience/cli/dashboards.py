"""`resilience dashboards export DIR`: write dashboards, rules and alerts for Prometheus and Grafana.

The files are shipped with the package, so they match the metrics that it exports."""

from __future__ import annotations

import argparse
from pathlib import Path

from resilience.system.render import say
from resilience.telemetry.dashboard_files import DATASOURCE, GRAFANA, write


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Write dashboards for Grafana; rules, alerts and their tests for Prometheus; and example configurations."
    )
    parser.epilog = "`resilience dashboards export --help` shows the options."
    verbs = parser.add_subparsers(title="commands", metavar="export DIR", required=True)
    export = verbs.add_parser("export", help="write all files into a folder", allow_abbrev=False)
    export.add_argument(
        "folder", metavar="DIR", type=Path, help="created if needed; files of an earlier export are replaced"
    )
    export.add_argument(
        "--datasource",
        metavar="NAME",
        default=DATASOURCE,
        help="name of Grafana's default Prometheus data source; default %(default)s",
    )
    export.add_argument(
        "--match",
        metavar="MATCHER",
        action="append",
        default=[],
        help="use only series with this label, such as 'cluster=\"a\"'; repeatable. Two clusters may use the same "
        "job id: then export once per cluster, with --name",
    )
    export.add_argument(
        "--name",
        metavar="NAME",
        help="name of this export, in titles, links and uids of the dashboards: exports with different names do not "
        "replace each other in Grafana",
    )
    export.add_argument(
        "--grafana",
        metavar="URL",
        default=GRAFANA,
        help="URL of Grafana for the links in alerts; default %(default)s",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the files; return the exit status.

    Raises: ConfigurationError if the folder cannot be written, or a matcher or the name is invalid."""
    matchers, grafana = tuple(arguments.match), arguments.grafana.rstrip("/")
    written = write(arguments.folder, arguments.datasource, grafana, matchers, arguments.name)
    start = "RESILIENCE_RUN_DIR=<run directory> docker compose up"
    say(f"wrote {len(written)} files to {arguments.folder}; start the servers there: {start}")
    return 0
