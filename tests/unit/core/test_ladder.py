"""A main thread is given up only after it has slept for the whole limit at one place that nothing frees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.core.ladder import LONGEST_GAP, Ladder, look

LIMIT = 2.0
EVERY = 0.05


def looked(*looks: tuple[object, bool], every: float = EVERY) -> Ladder:
    """The ladder after looks that are `every` seconds apart."""
    ladder = Ladder(LIMIT)
    for number, (place, is_asleep) in enumerate(looks):
        ladder = look(ladder, place, is_asleep, 100.0 + number * every)
    return ladder


def test_thread_asleep_at_one_place_for_the_limit_is_stuck() -> None:
    assert not looked(*[("helper", True)] * 39).is_stuck
    assert looked(*[("helper", True)] * 42).is_stuck


def test_thread_that_moves_is_not_stuck() -> None:
    looks = [(f"instruction {number // 20}", True) for number in range(1000)]
    assert not any(looked(*looks[:count]).is_stuck for count in range(0, 1000, 19))


def test_time_anywhere_else_does_not_count() -> None:
    assert not looked(*[(None, True)] * 1000).is_stuck
    assert not looked(*[("helper", True)] * 39, (None, True), *[("helper", True)] * 39).is_stuck


def test_time_in_which_the_thread_is_awake_does_not_count() -> None:
    assert not looked(*[("helper", False)] * 1000).is_stuck
    assert not looked(*[("helper", number % 2 == 0) for number in range(78)]).is_stuck


def test_watcher_that_did_not_get_to_run_has_not_observed_a_sleeping_thread() -> None:
    assert not looked(*[("helper", True)] * 10, every=60.0).is_stuck
    assert looked(*[("helper", True)] * 10, every=60.0).asleep_for == pytest.approx(9 * LONGEST_GAP)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.booleans(), st.floats(0.0, 10.0)), max_size=60))
def test_no_thread_is_stuck_before_the_limit_has_passed_since_it_came_to_its_place(
    looks: list[tuple[str | None, bool, float]],
) -> None:
    ladder, now, came_at, at = Ladder(LIMIT), 0.0, 0.0, None
    for place, is_asleep, pause in looks:
        now += pause
        came_at = now if place != at else came_at
        at = place
        ladder = look(ladder, place, is_asleep, now)
        assert not ladder.is_stuck or (place is not None and now - came_at >= LIMIT)
