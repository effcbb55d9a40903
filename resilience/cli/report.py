"""`resilience report RUN`: what broke, where, since when, what it cost, what to do next.

Reads a run folder, even while the job runs. Prints the report as text, or as JSON with --json; writes it as a page with
--html."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import msgspec

from resilience.cli.arguments import refuse_together
from resilience.cli.incomplete import say_incomplete
from resilience.cli.run_argument import add_run, find_run, no_such_incident
from resilience.facts import encoding
from resilience.report.condensed import as_json, report
from resilience.report.terminal import incident_lines, report_lines
from resilience.run_folder.load import Reader
from resilience.system.render import say, say_json, show, width_of_terminal


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Show what broke in a run, where, since when, what it cost, and what to do next."
    add_run(parser)
    parser.add_argument("--incident", type=int, metavar="N", help="show this incident only")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the report to this file as one self-contained HTML page"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the report; return the exit status.

    Raises: ConfigurationError for an argument that names no run or no incident."""
    if arguments.html is not None:
        refuse_together("--html", incident=arguments.incident, json=arguments.json)
    folder = find_run(arguments.run)
    if arguments.html is not None:
        from resilience.report import page  # imports jinja2

        page.write(arguments.html, folder)
        say(f"wrote {arguments.html}")
        return 0
    condensed = report(Reader(folder))
    if arguments.incident is not None:
        chosen = tuple(incident for incident in condensed.incidents if incident.number == arguments.incident)
        if not chosen:
            raise no_such_incident("--incident", arguments.incident, folder, len(condensed.incidents))
        condensed = msgspec.structs.replace(condensed, incidents=chosen)
    if arguments.json:
        say_json(encoding.to_json_page(as_json(condensed)))
        return 0
    width = width_of_terminal()
    if arguments.incident is not None:
        say_incomplete(folder, condensed.records_completeness)
        show(incident_lines(condensed.incidents[0], width, is_whole=True))
    else:
        show(report_lines(condensed, width, time.time_ns()))
    return 0
