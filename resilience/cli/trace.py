"""`resilience trace RUN`: where the time of a restart went, and the whole run for trace viewers.

As text: one restart, phase by phase, with its critical path, the ranks that all others waited for. With --format: the
spans of the whole run as a file."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec

from resilience.attribution.incident import Incident
from resilience.attribution.incidents import incidents_of
from resilience.attribution.waterfall import MEETINGS, NOTICE, PhaseRow, Step, Waterfall, waterfall
from resilience.cli.arguments import refuse_together
from resilience.cli.run_argument import add_run, find_readable_run
from resilience.errors import ConfigurationError
from resilience.facts import encoding
from resilience.facts.in_words import seconds
from resilience.history.phases import Who
from resilience.run_folder.merge import history_of, uncertainty_of
from resilience.system import files
from resilience.system.render import Line, cut, date, phase_name, say_json, show, width_of_terminal, wrap
from resilience.trace.export import otlp, parent_of, perfetto, trace_of

FORMATS = ("text", "perfetto", "otlp-json")
_NAME = 14
_NUMBERS = 30  # columns of the table's numbers
STEPS = 12  # shown of the critical path: the longest ones


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
    parent = parent_of(folder)
    with _opened(arguments.output) as output:
        if arguments.format == "perfetto":
            _write_events(perfetto(folder, parent), output)
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


def _write_events(events: Iterator[dict[str, Any]], out: TextIO) -> None:
    """Write one object with one event per line, so that neither writer nor reader has to hold all events."""
    out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    for number, event in enumerate(events):
        out.write(",\n" if number else "")
        say_json(encoding.to_json(event), out)
    out.write("\n]}\n")


def _restart(folder: Path, number: int | None) -> Waterfall:
    history = history_of(folder)
    incidents = incidents_of(history)
    if number is not None:
        candidates: list[Incident] = [incident for incident in incidents if incident.number == number]
        if not candidates:
            have = f"has incidents 1 to {len(incidents)}" if incidents else "has no incidents"
            raise ConfigurationError(f"--incident {number}: {folder} {have}")
    else:
        candidates = sorted(
            incidents, key=lambda each: each.restart.max_s if each.restart is not None else 0.0, reverse=True
        )
    for incident in candidates:
        restart = waterfall(history, incident)
        if restart is not None:
            trace_id = trace_of(folder, history, incident)
            return msgspec.structs.replace(restart, uncertainty_s=uncertainty_of(folder), trace_id=trace_id)
    if number is not None:
        problem = f"has no recorded restart of incident {number}"
    else:
        problem = "has no recorded restart" if incidents else "has no incidents"
    raise ConfigurationError(f"{folder} {problem}; --format perfetto exports the whole run")


# -- text --------------------------------------------------------------------------------------


def waterfall_lines(restart: Waterfall, width: int) -> Iterator[Line]:
    """Yield one restart for a terminal of `width` columns."""
    yield (
        (f"Restart after incident {restart.incident}", "bold"),
        (f"  {restart.kind}, {date(restart.start_ns)}", "dim"),
    )
    for text in wrap(summary(restart), width - 2):
        yield ((f"  {text}", "bold"),)
    yield ()
    bar = max(10, width - _NAME - _NUMBERS - 4)
    scale = f"0{seconds(restart.seconds):>{bar - 1}}"
    yield ((f"  {'':{_NAME}}{scale}  {'median':>8}{'slowest':>9}", "dim"),)
    for row in restart.rows:
        times = f"{seconds(row.median_s):>8} {seconds(row.max_s):>8}  "
        numbers = times + cut(_name_of(row.slowest), max(0, 28 - len(times)))
        before, full, light = _bar(row, restart.seconds, bar)
        after = " " * (bar - before - full - light)
        yield (
            (f"  {phase_name(row.name):{_NAME}}{' ' * before}", ""),
            ("█" * full, "cyan"),
            ("░" * light, "yellow"),
            (f"{after}  {numbers}", ""),
        )
    yield ((f"  {'':{_NAME}}█ until half had finished the phase, ░ until the last one had", "dim"),)
    yield ()
    yield (("  Critical path", "bold"),)
    longest_steps = sorted(sorted(restart.path, key=lambda step: -step.seconds)[:STEPS], key=lambda step: step.start_ns)
    for step in longest_steps:
        at = (step.start_ns - restart.start_ns) / 1e9
        share = round(100 * step.seconds / restart.seconds) if restart.seconds else 0
        text = f"  {seconds(at):>9}  {seconds(step.seconds):>9} {share:>3} %  {_step_in_words(step)}"
        yield ((cut(text, width), "bold" if step == restart.longest else ""),)
    if len(restart.path) > STEPS:
        yield ((f"  … and {len(restart.path) - STEPS} shorter steps", "dim"),)
    if restart.trace_id:
        yield ((f"  Trace {restart.trace_id}", "dim"),)
    if restart.uncertainty_s is not None:
        yield ((f"  Clocks of two nodes may differ by {seconds(restart.uncertainty_s)}.", "dim"),)


def summary(restart: Waterfall) -> str:
    """Return one sentence on where most of the time went."""
    longest = restart.longest
    if longest is None:
        return f"{seconds(restart.seconds)} in all"
    return f"of {seconds(restart.seconds)}, {seconds(longest.seconds)} {_step_in_words(longest)}"


def _step_in_words(step: Step) -> str:
    if step.name == NOTICE:
        return f"until {_name_of(step.who)} was notified"
    if step.name in MEETINGS:
        return f"in {step.name}, after the last rank or node arrived"
    return f"waiting for {_name_of(step.who)} in {phase_name(step.name)}"


def _name_of(who: Who) -> str:
    return f"rank {who}" if isinstance(who, int) else who


def _bar(row: PhaseRow, total: float, size: int) -> tuple[int, int, int]:
    """Return the columns before the bar, in its full part and in its light part. The bar is never empty."""
    scale = size / total if total > 0 else 0.0
    start = min(size - 1, round(row.start_s * scale))
    half = max(start + 1, min(size, round(row.half_s * scale)))
    return start, half - start, max(half, min(size, round(row.end_s * scale))) - half
