"""`resilience trace RUN`: where the time of a restart went, and the whole run for trace viewers.

As text: one restart, phase by phase, with its critical path, the ranks that all others waited for. With --format: the
spans of the whole run as a file."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import msgspec

from resilience.attribution.incident import Incident
from resilience.attribution.incidents import incidents_of
from resilience.attribution.waterfall import Waterfall, waterfall
from resilience.cli.arguments import refuse_together
from resilience.cli.incomplete import checked_history, say_incomplete
from resilience.cli.run_argument import add_run, find_readable_run, no_such_incident
from resilience.errors import ConfigurationError
from resilience.facts import encoding
from resilience.run_folder.load import completeness_of
from resilience.run_folder.merge import clocks_of, uncertainty_of
from resilience.system import files
from resilience.system.render import say_json, show, width_of_terminal
from resilience.trace.export import otlp, parent_of, perfetto, trace_of, write_events
from resilience.trace.terminal import waterfall_lines

FORMATS = ("text", "perfetto", "otlp-json")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Show where the time of a restart went, or export the spans of a run for a trace viewer."
    add_run(parser)
    parser.add_argument(
        "--incident", type=int, metavar="N", help="show the restart of this incident; default: the longest restart"
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="text",
        help="text: one restart; perfetto: for ui.perfetto.dev; otlp-json: for a collector; default %(default)s",
    )
    parser.add_argument("--output", "-o", metavar="FILE", help="write to this file instead of stdout")
    parser.add_argument("--json", action="store_true", help="print the restart as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print or write the trace; return the exit status.

    Raises: ConfigurationError if the argument names no run or no restart, or the file cannot be written."""
    if arguments.format != "text":
        refuse_together(f"--format {arguments.format}", incident=arguments.incident, json=arguments.json)
    folder = find_readable_run(arguments.run)
    if arguments.format == "text":
        restart = _restart(folder, arguments.incident)
        with _opened(arguments.output) as output:
            if arguments.json:
                say_json(encoding.to_json_page(restart), output)
            else:
                show(waterfall_lines(restart, width_of_terminal()), output)
        return 0
    say_incomplete(folder, completeness_of(folder))
    parent = parent_of(folder)
    with _opened(arguments.output) as output:
        if arguments.format == "perfetto":
            write_events(perfetto(folder, parent), output)
        else:
            for message in otlp(folder, parent):
                say_json(encoding.to_json(message) + b"\n", output)
    return 0


@contextlib.contextmanager
def _opened(path: str | None) -> Iterator[TextIO]:
    """Yield stdout, or a file that replaces `path` once all is written."""
    if path is None:
        yield sys.stdout
        return
    names: tuple[str | None, ...] = (None, str(Path(path)))
    try:
        with files.replacing(Path(path)) as written:
            names += (str(written),)
            with written.open("w", encoding="utf-8", errors="backslashreplace") as file:
                yield file
    except OSError as error:  # also of a write: the disk is full
        if error.filename not in names:
            raise
        raise ConfigurationError(f"--output {path}: cannot be written: {error.strerror or error}") from None


def _restart(folder: Path, number: int | None) -> Waterfall:
    history = checked_history(folder)
    incidents = incidents_of(history)
    if number is not None:
        candidates: list[Incident] = [incident for incident in incidents if incident.number == number]
        if not candidates:
            raise no_such_incident("--incident", number, folder, len(incidents))
    else:
        candidates = sorted(
            incidents,
            key=lambda incident: incident.restart.max_s if incident.restart is not None else 0.0,
            reverse=True,
        )
    clocks = clocks_of(folder)
    for incident in candidates:
        restart = waterfall(history, incident, clocks)
        if restart is not None:
            trace_id = trace_of(folder, history, incident)
            return msgspec.structs.replace(restart, uncertainty_s=uncertainty_of(folder), trace_id=trace_id)
    if number is not None:
        problem = f"has no recorded restart of incident {number}"
    else:
        problem = "has no recorded restart" if incidents else "has no incidents"
    raise ConfigurationError(f"{folder} {problem}; --format perfetto exports the whole run")
