"""Which run does a command read?  The argument that all readers share.

A run is named by its folder, or by its name or the job's id within RESILIENCE_RUN_DIR. Of a job with several attempts
its id means the newest one, `ID@N` attempt N. Without a name, it is the newest
one there."""

from __future__ import annotations

import argparse
from pathlib import Path

from resilience.adapters.environment import Settings
from resilience.analysis.load import is_run, runs_in
from resilience.cli.render import count
from resilience.core.identity import attempt_of, safe_name
from resilience.errors import ConfigurationError

RUNS_NAMED = 8  # runs named in the message of a wrong argument


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument that `find_run` reads."""
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="folder of the run, or its job within RESILIENCE_RUN_DIR (newest attempt; JOB@N: attempt N); "
        "default: the newest one there",
    )


def find_run(text: str | None) -> Path:
    """Return the run folder that an argument means. Raises: ConfigurationError, naming the runs there are."""
    root = Path(Settings.from_environment().run_dir)
    if text is not None:
        folder = _named(root, text)
        if folder is not None:
            return folder
        below = runs_in(Path(text))
        if len(below) == 1:
            return below[0]
        if below:
            raise ConfigurationError(
                f"{text} holds {count(len(below), 'run')}, not one; name one of them:{_list(below)}"
            )
        what = "is no run folder: it has no records/" if Path(text).exists() else "does not exist"
        known = runs_in(root)
        hint = f"runs in {root}:{_list(known)}" if known else f"there are no runs in {root} either (RESILIENCE_RUN_DIR)"
        raise ConfigurationError(f"{text} {what}; {hint}")
    known = runs_in(root)
    if not known:
        raise ConfigurationError(
            f"there are no runs in {root}; name the folder of one, or set RESILIENCE_RUN_DIR to where they are"
        )
    return known[0]


def run_or_file(path: Path) -> Path:
    """Return the run folder that a name means; a path that exists, or that names no run, as it is."""
    return path if path.exists() else _named(Path(Settings.from_environment().run_dir), str(path)) or path


def _named(root: Path, text: str) -> Path | None:
    found = (Path(text), _newest_attempt(root, text), root / text, root / safe_name(text))
    return next((folder for folder in found if folder is not None and is_run(folder)), None)


def _newest_attempt(root: Path, job_id: str) -> Path | None:
    """The folder of a job's newest attempt; `<job>@0` names the first one."""
    if job_id.endswith("@0"):
        return root / safe_name(job_id.removesuffix("@0"))
    attempts = {attempt_of(path.name, job_id): path for path in runs_in(root)}
    attempts.pop(None, None)
    return max(attempts.items(), key=lambda item: item[0] or 0)[1] if attempts else None


def _list(runs: list[Path]) -> str:
    more = f"\n  … and {len(runs) - RUNS_NAMED} more" if len(runs) > RUNS_NAMED else ""
    return "".join(f"\n  {path}" for path in runs[:RUNS_NAMED]) + more
