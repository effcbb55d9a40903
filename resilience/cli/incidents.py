"""`resilience incidents [RUNS…]`: group the incidents of many runs by fingerprint: count, place, cost.

A fault has the same fingerprint on all ranks, in all restarts and in all runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from resilience.attribution.symptoms import CLASSES
from resilience.cli.run_argument import find_runs
from resilience.errors import ConfigurationError
from resilience.facts import encoding
from resilience.facts.in_words import count, seconds
from resilience.report.repeats import KnownRun, RepeatedFault, as_json, faults, known_runs
from resilience.report.terminal import rework_unknown_in_words
from resilience.run_folder.load import incomplete_in_words, runs_in
from resilience.system.environment import Settings
from resilience.system.render import (
    Line,
    cut,
    date,
    field,
    say_json,
    show,
    width_of_terminal,
    wrap,
)

LISTED = 20  # faults; the others are only counted
NAMED = 4  # runs, nodes or ranks of one fault; the others are only counted


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Group the incidents of many runs by fault: how often each occurred, where, and at what cost."
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="run folder, folder that contains runs, or job id in RESILIENCE_RUN_DIR (all attempts; JOB@N: attempt N); "
        "default: all runs there",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument("--all", action="store_true", help=f"show all faults; default: the first {LISTED}")


def run(arguments: argparse.Namespace) -> int:
    """Print the faults; return the exit status. Raises: ConfigurationError for an argument that names no run."""
    folders = _folders(arguments.runs)
    known = list(known_runs(folders))
    repeated = faults(incident for run in known for incident in run.incidents)
    width, most = width_of_terminal(), None if arguments.all else LISTED
    if arguments.json:
        say_json(encoding.to_json_page(as_json(repeated)))
    else:
        show(fault_lines(repeated, len(folders), width, most))
    # The list of faults has no place for runs, so this is on stderr with --json too.
    if sys.stderr is not None:  # else it is closed
        show(incomplete_lines(known, width, most), sys.stderr)
    return 0


def incomplete_lines(known: Iterable[KnownRun], width: int, most: int | None) -> Iterator[Line]:
    """Yield at most `most` runs whose records are incomplete: they may have more incidents."""
    incomplete = [run for run in known if not run.completeness.is_whole]
    for run in incomplete[:most]:
        text = f"{run.name} is {incomplete_in_words(run.completeness)}"
        yield from (((line, "bold yellow"),) for line in wrap(text, width))
    if most is not None and len(incomplete) > most:
        yield ((f"{count(len(incomplete) - most, 'more incomplete run')}: --all shows them", "dim"),)


def fault_lines(repeated: list[RepeatedFault], runs: int, width: int, most: int | None) -> Iterator[Line]:
    """Yield at most `most` faults for a terminal of `width` columns."""
    total = sum(fault.count for fault in repeated)
    yield ((f"{count(total, 'incident')} of {count(len(repeated), 'fault')} in {count(runs, 'run')}", "bold"),)
    for fault in repeated[:most]:
        yield ()
        cost = "cost unknown" if fault.lost_s is None else f"{seconds(fault.lost_s)} lost"
        title = f"{fault.fingerprint}  {fault.count} x {CLASSES[fault.what]}, {cost}"
        yield ((cut(title, width), "bold"),)
        if fault.unknown_rework:
            yield from field("cost", rework_unknown_in_words(fault.unknown_rework), width)
        if fault.cause:
            yield from field("cause", fault.cause, width)
        if len(fault.runs) > 1:
            later = _named(fault.runs, fault.first_run)
            yield from field("seen", f"before in run {fault.first_run}, then in {later}", width)
        elif fault.runs:
            yield from field("seen", f"in run {fault.first_run}", width)
        until = "" if fault.first_ns == fault.last_ns else f" to {date(fault.last_ns)}"
        yield from field("when", f"{date(fault.first_ns)}{until}", width)
        if fault.nodes:
            yield from field("nodes", _counted(fault.nodes), width)
        if fault.ranks:
            yield from field("ranks", _counted(fault.ranks), width)
    if most is not None and len(repeated) > most:
        yield ()
        yield ((f"{count(len(repeated) - most, 'more fault')}: --all shows them", "dim"),)


def _named(runs: dict[str, int], first: str) -> str:
    later_runs = [run for run in runs if run != first]
    more_note = f" and {len(later_runs) - NAMED} more" if len(later_runs) > NAMED else ""
    return ", ".join(later_runs[:NAMED]) + more_note


def _counted(counts: dict[str, int] | dict[int, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
    more_note = f", {len(ordered) - NAMED} more" if len(ordered) > NAMED else ""
    return ", ".join(f"{name} ({number} x)" for name, number in ordered[:NAMED]) + more_note


def _folders(texts: list[str]) -> list[Path]:
    if not texts:
        root = Path(Settings.from_environment().run_dir)
        runs = runs_in(root)
        if not runs:
            raise ConfigurationError(f"there are no runs in {root}; give run folders, or set RESILIENCE_RUN_DIR")
        return _each_once(runs)
    return _each_once([folder for text in texts for folder in find_runs(text)])


def _each_once(folders: list[Path]) -> list[Path]:
    """Return each run once, by its own name rather than that of a symbolic link to it."""
    by_place: dict[str, Path] = {}
    for folder in sorted(folders, key=Path.is_symlink):
        by_place.setdefault(os.path.realpath(folder), folder)
    chosen = set(by_place.values())
    return list(dict.fromkeys(folder for folder in folders if folder in chosen))
