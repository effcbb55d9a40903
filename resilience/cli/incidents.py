"""`resilience incidents [RUNS…]`: group the incidents of many runs by fingerprint: count, place, cost.

A fault has the same fingerprint on all ranks, in all restarts and in all runs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from resilience.cli.run_argument import find_runs
from resilience.errors import ConfigurationError
from resilience.facts import encoding
from resilience.report.fault_list import fault_lines, incomplete_lines
from resilience.report.repeats import as_json, faults, known_runs
from resilience.run_folder.load import runs_in
from resilience.system.environment import Settings
from resilience.system.render import say_json, show, width_of_terminal

LISTED = 20  # faults; the others are only counted


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
