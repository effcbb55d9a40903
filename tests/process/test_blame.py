"""A rank is at fault for what it did, and for nothing that another rank's fault or our own abort brought about."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from resilience.adapters import processes
from resilience.attribution.incidents import fold
from resilience.core import events
from tests.process import blaming
from tests.support.ranks import Job

Start = Callable[..., Job]


def target(function: Callable[..., object]) -> str:
    return f"{blaming.__name__}:{function.__name__}"


def culprits(job: Job) -> list[set[int]]:
    """Whom the account blames, incident by incident."""
    return [{culprit.rank for culprit in incident.verdict.culprits} for incident in fold(job.records())]


def origins(job: Job) -> dict[int, set[str | None]]:
    """Whose fault each rank's exceptions are, over all iterations."""
    found: dict[int, set[str | None]] = {}
    for told in job.interruptions():
        if told.exception is not None:
            found.setdefault(told.rank, set()).add(told.origin)
    return found


def test_fault_inside_group_building_counts_for_its_rank_alone(start: Start) -> None:
    job = start(4, target(blaming.build_groups), faults=3, most=2)
    ranks = job.wait()
    assert [rank.value for rank in ranks] == [3, None, 3, 3]
    assert ranks[1].type == "FaultCounterExceeded"
    assert culprits(job) == [{1}] * 3
    found = origins(job)
    assert found.pop(1) == {"own"}
    assert all(told == {"consequence"} for told in found.values()), found


def test_survivors_of_a_killed_rank_are_cleared(start: Start) -> None:
    job = start(4, target(blaming.reduce_with_a_dying_rank))
    assert [rank.value for rank in job.wait()] == [1, None, 1, 1]
    assert culprits(job) == [{1}]
    assert all(told == {"consequence"} for told in origins(job).values())


def test_error_of_an_aborted_communicator_is_nobodys_fault(start: Start) -> None:
    job = start(3, target(blaming.be_aborted), faults=3)
    assert [rank.value for rank in job.wait()] == [3, 3, 3]
    assert culprits(job) == [{1}] * 3
    assert origins(job) == {0: {"consequence"}, 1: {"own"}, 2: {"consequence"}}


def test_two_ranks_that_fail_at_the_same_moment_are_both_at_fault(start: Start) -> None:
    job = start(3, target(blaming.fail_together), failing=[1, 2])
    for rank in (1, 2):
        job.await_sign("ready", rank=rank)
    store_host = job.monitor_pid(0)
    os.kill(store_host, signal.SIGSTOP)  # neither learns of the other's fault before it has failed itself
    try:
        job.let_on("ready")
        for rank in (1, 2):
            job.await_sign("raises", rank=rank)
            await_asleep(job.pids[rank])
    finally:
        os.kill(store_host, signal.SIGCONT)
    assert [rank.value for rank in job.wait()] == [0, 1, 1]
    assert culprits(job) == [{1, 2}]
    assert origins(job) == {1: {"own"}, 2: {"own"}}
    assert not job.of(events.RankLeft)


def await_asleep(pid: int) -> None:
    """Wait until the main thread of a process waits, as for an answer of the store."""
    deadline = time.monotonic() + 30
    while (seen := processes.state(pid)) is not None and seen.state != "S":
        assert time.monotonic() < deadline
        time.sleep(0.01)
