"""A rank that waits or is lost in a hook for places, before the first iteration too, costs no other rank."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from resilience.facts import events
from tests.process.entering import WAITS
from tests.support.ranks import Job

Start = Callable[..., Job]
TARGET = "tests.process.entering:wait_for_a_place"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("hook", "at_entry", "for_a_key"),
    [
        ("rank_assignment", True, False),
        pytest.param("rank_assignment", True, True, marks=slow),
        pytest.param("rank_filter", True, False, marks=slow),
        pytest.param("rank_assignment", False, False, marks=slow),
    ],
)
def test_rank_that_dies_while_it_waits_for_its_place_costs_no_other_rank(
    start: Start, hook: str, at_entry: bool, for_a_key: bool
) -> None:
    job = start(3, TARGET, hook=hook, at_entry=at_entry, for_a_key=for_a_key)
    job.await_sign(WAITS, rank=0)
    job.signal(0, signal.SIGKILL)
    dead, *healthy = job.wait()
    assert dead.signal == signal.SIGKILL
    assert [rank.value for rank in healthy] == [(1 if at_entry else 2, place, 2) for place in range(2)]
    assert [record.event.result for record in job.of(events.RankStoodInFor)] == ["excluded"]


def test_rank_that_is_told_to_end_while_it_waits_for_its_place_does_not_wait_again(start: Start) -> None:
    job = start(3, TARGET, hook="rank_assignment")
    job.await_sign(WAITS, rank=0)
    job.signal(0, signal.SIGINT)
    ended, *healthy = job.wait()
    assert ended.type == "KeyboardInterrupt"
    assert [rank.value for rank in healthy] == [(1, place, 2) for place in range(2)]
    assert job.of(events.RankSignalled) == job.of(events.RankStoodInFor) == []


@pytest.mark.parametrize("hook", ["rank_assignment", pytest.param("rank_filter", marks=slow)])
def test_endless_wait_for_a_lost_rank_in_a_hook_at_entry_costs_the_waiting_rank_alone(start: Start, hook: str) -> None:
    job = start(3, TARGET, hook=hook, is_lost=True)
    waiting, lost, healthy = job.wait()
    assert healthy.value == (1, 0, 1)
    assert "lost in the hook" in lost.error
    assert waiting.signal == signal.SIGTERM
    (silent,) = job.of(events.RankFellSilent)
    assert (silent.origin.initial_rank, silent.event.limit, silent.event.allowed_s) == (0, f"hook:{hook}", 20.0)
    assert {record.origin.initial_rank for record in job.of(events.RankSignalled)} == {0}


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=slow)])
def test_group_that_cannot_be_found_out_for_one_rank_at_entry_costs_no_other_rank(
    start: Start, is_killed: bool
) -> None:
    job = start(3, "tests.process.entering:group_by_rack", is_killed=is_killed)
    first, lost, last = job.wait()
    assert lost.signal == signal.SIGKILL if is_killed else "no such rack" in lost.error
    assert [first.value, last.value] == [(1, 0, 2), (1, 1, 2)]
