"""A rank that is interrupted once more on its way out is represented by its monitor; the others always go on.

If nobody represents the rank, the other one waits in a barrier until its limit, and ends with BarrierTimeout. So a
test sees either that it has not completed its call, or that the call took far too long."""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Callable, Iterator

import pytest

from resilience.facts import events
from tests.process.leaving import KINDS
from tests.support.ranks import Job
from tests.support.stops import stop

Start = Callable[..., Job]
LEAVE = "tests.process.leaving:leave_at_each"
GOES_ON_WITHIN = 45.0
"""Seconds for a whole call of the other rank, with its start. The aim is 2 s from the interruption on (docs/faults.md
has what was measured), but a machine that is busy with other work may stop each of these processes for seconds. A rank
that nobody represents costs the barrier's limit of 60 s, so the bound distinguishes the two."""


@pytest.fixture(scope="module")
def waits() -> Iterator[list[float]]:
    """For each call, the seconds from the first interruption of rank 1 until rank 0 has completed. Told, not judged: a
    machine may stand still meanwhile."""
    told: list[float] = []
    yield told
    if told:
        median, longest = statistics.median(told), max(told)
        print(
            f"\n{len(told)} cases: the other rank had completed {median:.2f} s (median), {longest:.2f} s at most later"
        )


def others_go_on(job: Job, limit: float, waits: list[float]) -> None:
    others, leaver = job.wait(limit)
    assert others.error == leaver.error == ""
    points, got, _, struck = leaver.value
    assert points > 0
    _, other_got, durations, _ = others.value
    assert other_got == ["done"] * len(got)
    assert len(durations) == points
    assert max(durations) <= GOES_ON_WITHIN
    assert struck
    ended = {record.origin.call: record.mono_ns / 1e9 for record in job.of(events.CallEnded, rank=0)}
    waits += [max(0.0, ended[call] - at) for call, at in struck if call in ended]  # a record may be lost


BY_STORE = [kind for kind in KINDS if kind != "discarded"]  # which all ranks know without a store operation


QUICK_KINDS = ("waiting",)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK_KINDS else pytest.mark.slow) for kind in BY_STORE]
)
def test_rank_interrupted_at_each_store_operation_of_its_way_out_is_represented(
    start: Start, kind: str, waits: list[float]
) -> None:
    others_go_on(start(2, LEAVE, kind=kind, what="operations"), 280.0, waits)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "waiting" else pytest.mark.slow) for kind in BY_STORE]
)
def test_rank_interrupted_again_and_again_on_its_way_out_is_represented(
    start: Start, kind: str, waits: list[float]
) -> None:
    others_go_on(start(2, LEAVE, kind=kind, what="operations, again"), 280.0, waits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rank_interrupted_at_each_line_of_its_way_out_is_represented(
    start: Start, kind: str, waits: list[float]
) -> None:
    others_go_on(start(2, LEAVE, kind=kind, what="lines"), 1200.0, waits)


@pytest.mark.parametrize("comes", ["SIGTERM", "SIGALRM", "SIGINT"])
@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_process_that_ends_by_a_second_signal_is_represented(start: Start, comes: str, at: int) -> None:
    job = start(2, "tests.process.leaving:end_at", at=at, comes=comes)
    others, leaver = job.wait(60.0)
    assert (others.value, leaver.type) == ("done", "Second")
    assert job.await_record(events.RankStoodInFor, rank=1).event.result == "excluded"


def test_rank_that_waits_in_vain_names_the_missing_rank_and_does_not_wait_twice(start: Start) -> None:
    options = {"soft_timeout": 5.0, "hard_timeout": 6.0, "heartbeat_timeout": 6.0, "barrier_timeout": 7.0}
    job = start(2, "tests.process.leaving:wait_in_vain", options=options)
    for rank in range(2):
        job.await_sign("stop", rank)
    stopped = [job.monitor_pid(1), job.pids[1]]
    stop(*stopped)  # no process of this node notices that
    job.let_on("stop")
    waited = job.wait_rank(0)
    for pid in stopped:
        os.kill(pid, signal.SIGKILL)
    assert waited is not None, job.output()
    error, seconds = waited.value
    assert "rank 0 waited 7 s in barrier '0/end' and not all 2 ranks arrived; missing at last: 1." in error
    assert seconds == options["barrier_timeout"]


def test_monitor_outlives_signals_to_the_process_group_from_its_first_moment_on(start: Start) -> None:
    job = start(1, "tests.process.leaving:signalled_as_soon_as_forked")
    assert [rank.value for rank in job.wait()] == ["done"]
    assert not job.of(events.MonitorLost)
