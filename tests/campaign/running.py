"""Runs one case to its end, or ends it: no process of it is left, whatever becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.campaign.cases import STEPS, Case, to_json
from tests.campaign.contestants import Contestant, Verdict, environment

LIMIT_S = 90.0  # for a job that takes 10 s without a fault, on a busy machine
MARK = "CAMPAIGN_CASE"


@dataclass(frozen=True)
class Outcome:
    """What became of a case. recovered: the job reached its end. is_equal: with the parameters of an undisturbed run.
    orphans: processes that were left 3 s after the end."""

    case: Case
    contestant: str
    verdict: Verdict
    recovered: bool
    is_equal: bool
    is_injected: bool
    is_wedged: bool
    duration_s: float
    orphans: int


def run(case: Case, contestant: Contestant, folder: Path, undisturbed: str = "", limit: float = LIMIT_S) -> Outcome:
    """Run a case in a folder that does not exist yet. undisturbed: the result of a run without a fault."""
    folder.mkdir(parents=True)
    (folder / "truth.json").write_text(to_json(case))  # before anything is started
    mark = f"{os.getpid()}-{folder.name}-{contestant.name}"
    began = time.monotonic()
    with (folder / "output").open("wb") as output:
        processes = [
            subprocess.Popen(
                command,
                env=environment(folder, {**variables, MARK: mark}),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                start_new_session=True,
            )
            for command, variables in contestant.commands(case, folder)
        ]
        try:
            is_wedged = not _await(processes, began + limit)
            duration = time.monotonic() - began
            if not is_wedged:
                _await_gone(mark, time.monotonic() + 3.0)
            orphans = 0 if is_wedged else len(list(_left(mark)))
        finally:
            _end(mark)
            for process in processes:
                process.wait()
    result = folder / "result"
    recovered = result.exists() and not is_wedged
    return Outcome(
        case=case,
        contestant=contestant.name,
        verdict=contestant.verdict(case, folder),
        recovered=recovered,
        is_equal=recovered and result.read_text() == undisturbed,
        is_injected=(folder / "injected").exists(),
        is_wedged=is_wedged,
        duration_s=duration,
        orphans=orphans,
    )


def undisturbed(contestant: Contestant, folder: Path) -> str:
    """Return the result of a run in which nothing breaks: the same for all sizes."""
    case = Case(0, 0, "launcher", 2, "none", rank=-1, step=STEPS)
    outcome = run(case, contestant, folder)
    assert outcome.recovered, f"a job without a fault did not come to its end: see {folder}"
    return (folder / "result").read_text()


def _await(processes: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
    return True


def _await_gone(mark: str, deadline: float) -> None:
    while time.monotonic() < deadline and any(_left(mark)):
        time.sleep(0.1)


def _left(mark: str) -> Iterator[psutil.Process]:
    """Yield the processes of a case that still run, by the variable that all of them have."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_marked = process.pid != os.getpid() and process.environ().get(MARK) == mark
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _end(mark: str) -> None:
    for _ in range(50):
        left = list(_left(mark))
        if not left:
            return
        for process in left:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        time.sleep(0.1)
