"""What is known of a hang is known before it is changed: all ranks are looked at before anything is sent or cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.cli import main
from resilience.facts import events
from resilience.facts.records import Record
from tests.process.jobs import RESULT
from tests.process.launching import launcher
from tests.process.patient_monitor import PATIENCE
from tests.process.told import culprits, only_incident
from tests.support.ranks import Job

Start = Callable[..., Job]
FAST = {"soft_timeout": 5.0, "hard_timeout": 12.0}
HANGS = """
import torch, torch.distributed as dist
import resilience
dist.init_process_group("gloo")
resilience.step(3)
dist.all_reduce(torch.ones(1))
if cycle == 0 and rank == 1:
    resilience.heartbeat()  # from now on its silence counts
    time.sleep(1000)
dist.all_reduce(torch.ones(1))
"""


def leaf(record: Record) -> str:
    stack = record.event.stack
    return str(stack[-1].file.rsplit("/", 1)[-1]) if stack else ""


@pytest.mark.parametrize("kind", [pytest.param("sleep", marks=pytest.mark.slow), "stop"])
def test_all_ranks_are_seen_before_any_is_cut(start: Start, kind: str) -> None:
    fault = {"kind": kind, "rank": 1, "iteration": 0, "step": 5}
    job = start(4, "tests.process.jobs:train_with_evidence", faults=[fault], options=FAST)
    survivors = [0, 2, 3] if kind == "stop" else [0, 1, 2, 3]
    values = [rank.value for rank in job.wait()]
    assert [values[rank] for rank in survivors] == [RESULT] * len(survivors)
    first = [record for record in job.of(events.IterationDecided) if record.origin.iteration == 0]
    seen = {record.origin.initial_rank: record for record in first}
    told = [record for record in job.of(events.OthersSeen) if record.origin.iteration == 0]
    assert told
    assert not [record.event for record in told if record.event.missing]
    others = [seen[rank] for rank in (0, 2, 3)]
    assert {leaf(record) for record in others} == {"distributed_c10d.py"}
    cuts = [record for record in job.of(events.AbortCut) if record.origin.iteration == 0]
    first_cut = min(record.wall_ns - round(record.event.duration_s * 1e9) for record in cuts)
    # Ranks that wait for the one that hangs are silent too, and any may be the first to be noticed. The monitor of a
    # rank whose limit was exceeded has taken its stacks before it says so; then the rank's own look may come later.
    for record in others:
        by_monitor = [
            taken.wall_ns
            for taken in job.of(events.EvidenceCaptured, rank=record.origin.initial_rank, role="monitor")
            if taken.origin.iteration == 0
        ]
        assert min([record.wall_ns, *by_monitor]) < first_cut
    for signalled in job.of(events.RankSignalled):
        assert min(record.wall_ns for record in told) < signalled.wall_ns


def test_all_workers_are_seen_before_one_is_signalled(start: Start, tmp_path: Path) -> None:
    job = launcher(start, tmp_path)(HANGS, "--ft-rank-heartbeat-timeout", "2", nproc=3, SLOW_ANSWERS="evidence")
    assert job.wait(120.0) == [0]
    assert culprits(only_incident(job)) == [(1, "hung")]
    seen = {record.origin.initial_rank: record for record in job.account.records() if is_a(record, events.WorkerSeen)}
    signalled = next(record for record in job.account.records() if is_a(record, events.RankSignalled))
    (told,) = job.of(events.OthersSeen)
    assert (told.event.rank, told.event.missing, told.event.elsewhere) == (1, (), 0)
    assert seen.keys() == {0, 2}
    for record in seen.values():
        assert record.wall_ns < told.wall_ns
        assert (record.event.hang, leaf(record)) == ("in_collective", "distributed_c10d.py")
    assert signalled.origin.initial_rank == 1
    # The agent's word lets the rank be ended, not the end of its monitor's patience.
    assert abs(signalled.wall_ns - told.wall_ns) < PATIENCE / 2 * 1e9
    assert max(record.wall_ns for record in seen.values()) < signalled.wall_ns


@pytest.mark.parametrize("kind", ["exception", "kill"])
def test_stacks_of_all_ranks_of_a_wrapper_are_on_record_after_an_exception_or_a_death(
    start: Start, tmp_path: Path, kind: str
) -> None:
    job = start(3, "tests.process.jobs:break_while_others_wait", kind=kind)
    for rank in (0, 2):
        job.await_sign("waiting", rank)
    job.let_on("breaking")
    assert [rank.value for rank in job.wait()] == [1, 1 if kind == "exception" else None, 1]
    seen = [record for record in job.of(events.IterationDecided) if record.origin.iteration == 0]
    stacks = {record.origin.initial_rank: record.event.stack for record in seen}
    assert stacks.keys() == ({0, 1, 2} if kind == "exception" else {0, 2})
    assert all(stacks.values())
    for rank in (0, 2):
        assert "wait_for_the_restart" in {frame.function for frame in stacks[rank]}
    assert not job.of(events.OthersSeen)  # nothing waits for them: the exception or the exit status is the evidence
    assert main(["report", str(job.run), "--html", str(tmp_path / "report.html")]) == 0
    assert " wait_for_the_restart\n" in (tmp_path / "report.html").read_text()


def is_a(record: Record, kind: type[events.Event]) -> bool:
    return isinstance(record.event, kind)
