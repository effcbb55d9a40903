"""Runs one case to its end, or ends it: no process of it is left, whatever becomes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.campaign.cases import LIMIT_FACTOR, STEPS, Case, to_json
from tests.campaign.contestants import Contestant, Verdict, environment
from tests.campaign.injector import truth_of

LIMIT_S = 90.0  # for a job that takes 10 s without a fault, on a busy machine
MORE_S = 45.0  # for each of: 8 ranks, a second fault, another kind of training
ORPHAN_S = 8.0  # after the end; a DataLoader's worker looks for its parent every 5 s
MARK = "CAMPAIGN_CASE"


@dataclass(frozen=True)
class Measures:
    """What a fault cost, None if it is not known. detect_s: from the fault to the incident. recover_s: from the last
    fault until all ranks that go on have begun a step. steps_repeated: steps that were begun, and begun again.
    healthy_lost: ranks without a fault that were not there at the end. restarts: how often the ranks started anew, at
    most."""

    detect_s: float | None = None
    recover_s: float | None = None
    steps_repeated: int | None = None
    healthy_lost: int | None = None
    restarts: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a case. recovered: the job reached its end. is_equal: with the parameters of an undisturbed run.
    orphans: processes that were left 8 s after the end. struck: whether each fault did. commit, date: of the run, "-"
    if not noted."""

    case: Case
    contestant: str
    verdict: Verdict
    recovered: bool
    is_equal: bool
    is_injected: bool
    is_wedged: bool
    duration_s: float
    orphans: int
    struck: tuple[bool, bool] = (True, True)
    measures: Measures = field(default_factory=Measures)
    commit: str = "-"
    date: str = "-"


def limit_of(case: Case) -> float:
    """Return the seconds after which a case is ended."""
    return (LIMIT_S + MORE_S * ((case.world > 4) + bool(case.second) + (case.kind != "ddp"))) * case.patience


def run(case: Case, contestant: Contestant, folder: Path, undisturbed: str = "") -> Outcome:
    """Run a case in a folder that does not exist yet. undisturbed: the result of a run without a fault."""
    folder.mkdir(parents=True)
    truth_of(folder).write_text(to_json(case))  # before anything is started
    mark = f"{os.getpid()}-{folder.name}-{contestant.name}."
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
            is_wedged = not _await(processes, began + limit_of(case))
            duration = time.monotonic() - began
            if not is_wedged:
                _await_gone(mark, time.monotonic() + ORPHAN_S * case.patience)
            orphans = 0 if is_wedged else len(list(_left(mark)))
        finally:
            end(mark)
            for process in processes:
                process.wait()
    result = folder / "result"
    recovered = result.exists() and not is_wedged
    verdict = contestant.verdict(folder)
    strikes = [_moment(folder / "injected"), _moment(folder / "injected-second")]
    struck = (strikes[0] is not None, strikes[1] is not None)
    return Outcome(
        case=case,
        contestant=contestant.name,
        verdict=verdict,
        recovered=recovered,
        is_equal=recovered and result.read_text() == undisturbed,
        is_injected=struck[0],
        is_wedged=is_wedged,
        duration_s=duration,
        orphans=orphans,
        struck=struck,
        measures=measure(
            steps_of(folder / "steps.jsonl"),
            [at for at in strikes if at is not None],
            set(case.guilty(struck)),
            verdict.detected_ns,
        ),
    )


def _moment(path: Path) -> int | None:
    return int(path.read_text()) if path.exists() else None


@dataclass(frozen=True)
class Step:
    """A rank began a step. entry: which call of the training function it was in."""

    at_ns: int
    rank: int
    step: int
    entry: str


def steps_of(path: Path) -> list[Step]:
    """Return the steps that a job's ranks noted."""
    return [Step(*json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def measure(steps: list[Step], strikes: list[int], guilty: set[int], detected_ns: int | None) -> Measures:
    """Return what the faults at these moments cost."""
    if not strikes or not steps:
        return Measures()
    begun: dict[str, Step] = {}
    entries: dict[int, set[str]] = {}
    for step in sorted(steps, key=lambda step: step.at_ns):
        begun.setdefault(step.entry, step)
        entries.setdefault(step.rank, set()).add(step.entry)
    last = {step.rank: begun[step.entry] for step in steps}  # the last entry of each rank
    at_end = {step.rank for step in steps if step.step == STEPS - 1}
    again = [step for rank, step in last.items() if rank in at_end and step.at_ns > max(strikes)]
    before = [step for step in steps if step.at_ns <= max(strikes)]
    resumed = min((step.step for step in again), default=None)
    reached = max((step.step for step in before), default=None)
    repeated = None if resumed is None or reached is None else max(0, reached - resumed + 1)
    return Measures(
        detect_s=None if detected_ns is None else (detected_ns - min(strikes)) / 1e9,
        recover_s=(max(step.at_ns for step in again) - max(strikes)) / 1e9 if again else None,
        steps_repeated=repeated if again or not at_end else 0,
        healthy_lost=len({step.rank for step in before} - guilty - at_end) if at_end else None,
        restarts=max(len(of_rank) for of_rank in entries.values()) - 1,
    )


def undisturbed(contestant: Contestant, kind: str, folder: Path) -> str:
    """Return the result of a run in which nothing breaks: the same for all sizes."""
    case = Case(0, 0, "launcher", 2, "none", rank=-1, step=STEPS, kind=kind, patience=LIMIT_FACTOR)
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
    """Yield the processes of a case that still run, by the variable that all of them have: it begins with the mark."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_marked = process.pid != os.getpid() and process.environ().get(MARK, "").startswith(mark)
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def end(mark: str) -> None:
    """End the processes of the cases whose mark begins so."""
    for _ in range(50):
        left = list(_left(mark))
        if not left:
            return
        for process in left:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        time.sleep(0.1)
