"""`resilience trace RUN`: where the time of a restart went, and the whole run for trace viewers.

As text one restart, phase by phase, with its critical path: whom all the others waited for. With --format the
spans of the whole run as a file."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec

from resilience.analysis.merge import history_of, uncertainty_of
from resilience.analysis.trace import otlp, parent_of, perfetto, trace_of
from resilience.analysis.waterfall import MEETINGS, NOTICE, Row, Step, Waterfall, waterfall
from resilience.attribution.incident import Incident
from resilience.attribution.incidents import incidents_of
from resilience.cli.render import Line, cut, date, phase_name, say_json, seconds, show, width_of_terminal, wrap
from resilience.cli.run_argument import add_run, find_run
from resilience.core import encoding
from resilience.errors import ConfigurationError
from resilience.history.phases import Who

FORMATS = ("text", "perfetto", "otlp-json")
_NAME = 12
_NUMBERS = 30  # columns of the table's numbers
STEPS = 12  # of the critical path that are told, the longest


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Tell where the time of a restart went, or write the spans of a run for a trace viewer."
    add_run(parser)
    parser.add_argument("--incident", type=int, metavar="N", help="this incident's restart; default: the longest one")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="text",
        help="perfetto: for ui.perfetto.dev; otlp-json: as a collector reads",
    )
    parser.add_argument("--output", "-o", metavar="FILE", help="write there instead of stdout")
    parser.add_argument("--json", action="store_true", help="print the restart as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print or write the trace; return the exit status.

    Raises: ConfigurationError for an argument that names no run, no restart or no file that can be written."""
    folder = find_run(arguments.run)
    with _opened(arguments.output) as out:
        if arguments.format == "text":
            found = _restart(folder, arguments.incident)
            if arguments.json:
                say_json(encoding.to_json_page(found), out)
            else:
                show(waterfall_lines(found, width_of_terminal()), out)
            return 0
        parent = parent_of(folder)
        if arguments.format == "perfetto":
            _write_events(perfetto(folder, parent), out)
        else:
            for message in otlp(folder, parent):
                say_json(encoding.to_json(message) + b"\n", out)
    return 0


@contextlib.contextmanager
def _opened(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(Path(path).open("w", encoding="utf-8", errors="backslashreplace"))
        except OSError as error:
            raise ConfigurationError(f"--output {path}: cannot be written: {error.strerror or error}") from None
        yield file


def _write_events(events: Iterator[dict[str, Any]], out: TextIO) -> None:
    """One event a line, within one object, so that neither side has to hold all."""
    out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    for number, event in enumerate(events):
        out.write(",\n" if number else "")
        say_json(encoding.to_json(event), out)
    out.write("\n]}\n")


def _restart(folder: Path, number: int | None) -> Waterfall:
    history = history_of(folder)
    incidents = incidents_of(history)
    if number is not None:
        wanted: list[Incident] = [incident for incident in incidents if incident.number == number]
        if not wanted:
            have = f"has incidents 1 to {len(incidents)}" if incidents else "has no incidents"
            raise ConfigurationError(f"--incident {number}: {folder} {have}")
    else:
        wanted = sorted(incidents, key=lambda one: one.restart.max_s if one.restart is not None else 0.0, reverse=True)
    for incident in wanted:
        found = waterfall(history, incident)
        if found is not None:
            trace_id = trace_of(folder, history, incident)
            return msgspec.structs.replace(found, uncertainty_s=uncertainty_of(folder), trace_id=trace_id)
    what = "has no incidents" if not incidents else "has no restart on record"
    raise ConfigurationError(f"{folder} {what}; --format perfetto shows what else the run did")


# -- text --------------------------------------------------------------------------------------


def waterfall_lines(found: Waterfall, width: int) -> Iterator[Line]:
    """Yield one restart for a terminal of `width` columns."""
    yield ((f"Restart after incident {found.incident}", "bold"), (f"  {found.kind}, {date(found.start_ns)}", "dim"))
    for text in wrap(summary(found), width - 2):
        yield ((f"  {text}", "bold"),)
    yield ()
    bar = max(10, width - _NAME - _NUMBERS - 4)
    scale = f"0{seconds(found.seconds):>{bar - 1}}"
    yield ((f"  {'':{_NAME}}{scale}  {'median':>8}{'slowest':>9}", "dim"),)
    for row in found.rows:
        numbers = f"{seconds(row.median_s):>8}{seconds(row.max_s):>9}  {cut(_short(row.slowest), 9)}"
        before, most, rest = _bar(row, found.seconds, bar)
        after = " " * (bar - before - most - rest)
        yield (
            (f"  {phase_name(row.name):{_NAME}}{' ' * before}", ""),
            ("█" * most, "cyan"),
            ("░" * rest, "yellow"),
            (f"{after}  {numbers}", ""),
        )
    yield ((f"  {'':{_NAME}}█ until half of them had ended it, ░ until the last one had", "dim"),)
    yield ()
    yield (("  Critical path", "bold"),)
    shown = sorted(sorted(found.path, key=lambda step: -step.seconds)[:STEPS], key=lambda step: step.start_ns)
    for step in shown:
        at = (step.start_ns - found.start_ns) / 1e9
        share = round(100 * step.seconds / found.seconds) if found.seconds else 0
        text = f"  {seconds(at):>9}  {seconds(step.seconds):>9} {share:>3} %  {_told(step)}"
        yield ((cut(text, width), "bold" if step == found.longest else ""),)
    if len(found.path) > STEPS:
        yield ((f"  … and {len(found.path) - STEPS} shorter steps", "dim"),)
    if found.trace_id:
        yield ((f"  Trace {found.trace_id}", "dim"),)
    if found.uncertainty_s is not None:
        yield ((f"  Clocks of two nodes may differ by {seconds(found.uncertainty_s)}.", "dim"),)


def summary(found: Waterfall) -> str:
    """Return where most of the time went, in a sentence."""
    longest = found.longest
    if longest is None:
        return f"{seconds(found.seconds)} in all"
    return f"of {seconds(found.seconds)}, {seconds(longest.seconds)} {_told(longest)}"


def _told(step: Step) -> str:
    if step.name == NOTICE:
        return f"until {_short(step.who)} knew of it"
    if step.name in MEETINGS:
        return f"in {step.name}, after the last one had come"
    return f"waiting for {_short(step.who)} in {phase_name(step.name)}"


def _short(who: Who) -> str:
    return f"rank {who}" if isinstance(who, int) else who


def _bar(row: Row, total: float, size: int) -> tuple[int, int, int]:
    """Return how many columns are before the bar, in its full and in its light part; it is never empty."""
    scale = size / total if total > 0 else 0.0
    start = min(size - 1, round(row.start_s * scale))
    half = max(start + 1, min(size, round(row.half_s * scale)))
    return start, half - start, max(half, min(size, round(row.end_s * scale))) - half
