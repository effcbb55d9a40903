"""Which run does a command read?  The argument that all reading commands share.

A run is given by its folder, or by its name or job id in RESILIENCE_RUN_DIR. The id of a job with several attempts
means the newest attempt, or all attempts for `resilience incidents`, which reads many runs; `ID@N` means attempt N.
Without an argument, commands read the newest run there."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from resilience.errors import ConfigurationError
from resilience.facts.identity import attempt_of, safe_name
from resilience.facts.in_words import count
from resilience.run_folder.load import RECORDS, is_run, runs_in, unlisted_in
from resilience.system.environment import Settings

RUNS_NAMED = 8  # runs listed in an error message


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument that `find_run` reads."""
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="run folder, or job id in RESILIENCE_RUN_DIR (newest attempt; JOB@N: attempt N); "
        "default: the newest run there",
    )


def find_run(text: str | None) -> Path:
    """Return the run folder that an argument means. Raises: ConfigurationError, which lists the existing runs."""
    root = Path(Settings.from_environment().run_dir)
    if text is not None:
        folder = _named(root, text)
        if folder is not None:
            return folder
        below = runs_in(Path(text))
        if len(below) == 1:
            return below[0]
        if below:
            raise ConfigurationError(f"{text} contains {count(len(below), 'run')}; name one of them:{_list(below)}")
        existing = runs_in(root)
        hint = (
            f"runs in {root}:{_list(existing)}"
            if existing
            else f"there are no runs in {root} either (RESILIENCE_RUN_DIR)"
        )
        raise ConfigurationError(f"{text} {_problem(Path(text))}; {hint}")
    existing = runs_in(root)
    if not existing:
        raise ConfigurationError(
            f"there are no runs in {root}; give a run folder, or set RESILIENCE_RUN_DIR to the folder of the runs"
        )
    return existing[0]


def find_readable_run(text: str | None) -> Path:
    """Return the run folder that an argument means. Raises: ConfigurationError, also if its records cannot be read."""
    folder = find_run(text)
    refuse_unlisted(folder, RECORDS)
    return folder


def find_runs(text: str) -> list[Path]:
    """Return the runs that an argument means: a run, those within a folder, or all attempts of a job, oldest first.

    Raises: ConfigurationError, which lists the existing runs."""
    path = Path(text)
    if is_run(path):
        return [path]
    attempts = _attempts(Path(Settings.from_environment().run_dir), text)
    return runs_in(path) or [attempts[number] for number in sorted(attempts)] or [find_run(text)]


def refuse_unlisted(folder: Path, *names: str) -> None:
    """Raise ConfigurationError if one of these folders of a run exists but cannot be listed."""
    for unlisted in unlisted_in(folder, *names):
        raise ConfigurationError(f"{folder / unlisted.file} {unlisted.what}")


def run_or_file(path: Path) -> Path:
    """Return the run folder that a name means. Return an existing path, or one that names no run, unchanged."""
    return path if os.path.exists(path) else _named(Path(Settings.from_environment().run_dir), str(path)) or path


def _named(root: Path, text: str) -> Path | None:
    candidates = (Path(text), _newest_attempt(root, text), root / text, root / safe_name(text))
    return next((folder for folder in candidates if folder is not None and is_run(folder)), None)


def _problem(path: Path) -> str:
    """Return why a path is not a run folder."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte
        return "does not exist"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    try:
        (path / RECORDS).stat()
    except PermissionError as error:
        return f"cannot be read: {error.strerror}"
    except OSError:
        pass  # not there
    return "is not a run folder: it has no records/"


def _newest_attempt(root: Path, job_id: str) -> Path | None:
    """Return the folder of a job's newest attempt; for `<job>@0`, the folder of the first one."""
    if job_id.endswith("@0"):
        return root / safe_name(job_id.removesuffix("@0"))
    attempts = _attempts(root, job_id)
    return attempts[max(attempts)] if attempts else None


def _attempts(root: Path, job_id: str) -> dict[int, Path]:
    """Return the folders of a job's attempts, by number."""
    try:
        runs = runs_in(root)
    except ConfigurationError:
        return {}  # a folder that cannot be listed may still have a run of this name
    return {attempt: path for path in runs if (attempt := attempt_of(path.name, job_id)) is not None}


def _list(runs: list[Path]) -> str:
    more = f"\n  … and {len(runs) - RUNS_NAMED} more" if len(runs) > RUNS_NAMED else ""
    return "".join(f"\n  {path}" for path in runs[:RUNS_NAMED]) + more


def no_such_incident(option: str, number: int, folder: Path, most: int) -> ConfigurationError:
    """Return the error of an option that names an incident which the run does not have. most: how many it has."""
    have = {0: "no incidents", 1: "one incident, number 1"}.get(most, f"incidents 1 to {most}")
    return ConfigurationError(f"{option} {number}: {folder} has {have}")
