"""`resilience dashboards export DIR`: write dashboards, rules and alerts for Prometheus and Grafana.

Everything is made from the installed package, so that it fits the metrics that the package exports."""

from __future__ import annotations

import argparse
from pathlib import Path

from resilience.analysis.dashboards.export import DATASOURCE, GRAFANA, write
from resilience.cli.render import say


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Dashboards for Grafana; rules, alerts and their tests for Prometheus; examples to start them."
    verbs = parser.add_subparsers(metavar="export", required=True)
    export = verbs.add_parser("export", help="write all files into a folder", allow_abbrev=False)
    export.add_argument(
        "folder", metavar="DIR", type=Path, help="made if needed; files of an earlier export are replaced"
    )
    export.add_argument(
        "--datasource",
        metavar="NAME",
        default=DATASOURCE,
        help="Grafana's Prometheus data source that is chosen at first; default %(default)s",
    )
    export.add_argument(
        "--match",
        metavar="MATCHER",
        action="append",
        default=[],
        help="look only at series with this label, such as 'cluster=\"a\"'; may be repeated. Job ids of two clusters "
        "may be equal: export once for each cluster, into folders of Grafana and Prometheus of their own",
    )
    export.add_argument(
        "--grafana",
        metavar="URL",
        default=GRAFANA,
        help="where people reach Grafana, for the links in alerts; default %(default)s",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the files; return the exit status.

    Raises: ConfigurationError if the folder cannot be written, or what dashboards are built with is missing."""
    written = write(arguments.folder, arguments.datasource, arguments.grafana.rstrip("/"), tuple(arguments.match))
    say(f"{len(written)} files in {arguments.folder}; RESILIENCE_RUN_DIR=<run directory> docker compose up starts them")
    return 0
