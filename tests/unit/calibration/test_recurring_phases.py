"""Positions at which runs are slow: known if all runs agree, and no farther than two runs came."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from resilience.calibration.recurring_phases import Course, recurring
from resilience.core.observation import Doing, Observation
from resilience.core.watch import exceeded
from resilience.facts.limits import First, Limit, Limits, Outside
from resilience.facts.phases import Phases


def course(reach: int, *slow: int) -> Course:
    return Course(dict.fromkeys(slow, 10.0), 1.0, reach)


def test_positions_in_which_all_runs_agree_are_phases() -> None:
    assert recurring([course(50, 10, 20, 33), course(50, 10, 20), course(15, 10)]) == Phases((10, 20), 50)


def test_one_run_shows_no_phases() -> None:
    assert recurring([course(50, 10)]) is None
    assert recurring([course(50, 10, 40), course(30, 11)]) is None


def test_values_that_are_not_slow_are_none() -> None:
    assert recurring([Course({10: 1.4}, 1.0, 50), Course({10: 1.4}, 1.0, 50)]) is None


def test_three_runs_show_that_there_is_no_phase_as_far_as_two_of_them_came() -> None:
    assert recurring([course(50), course(40), course(30)]) == Phases((), 40)
    assert recurring([course(50, 10), course(40), course(30)]) == Phases((), 40)
    assert recurring([course(50), course(40)]) is None
    assert Phases((), 40).is_outside(39) and not Phases((), 40).is_outside(40)


@pytest.mark.parametrize(
    ("number", "is_outside"), [(0, True), (8, True), (9, False), (10, False), (11, False), (12, True), (49, True)]
)
def test_neighbours_of_a_position_belong_to_it(number: int, is_outside: bool) -> None:
    assert Phases((10, 20), 50).is_outside(number) is is_outside


@pytest.mark.parametrize("number", [-1, 50, 5000])
def test_nothing_is_known_beyond_the_second_longest_run(number: int) -> None:
    assert not Phases((10,), 50).is_outside(number)


def seen(gaps: int, start: str = "cold", aligned: Collection[str] = ("step",)) -> Observation:
    return Observation(
        doing=Doing.FUNCTION,
        step_at=0.0,
        step_gaps=gaps,
        start=start,  # type: ignore[arg-type]
        aligned=frozenset(aligned),
    )


def test_short_limit_holds_outside_phases_after_a_cold_start_only() -> None:
    outside = Outside(Limit(hard=2.0), Phases((10,), 50))
    limits = Limits(
        step=Limit(hard=60.0), outside={"step": outside}, first={"step": First(3, {"cold": Limit(hard=90.0)})}
    )

    def allowed(observation: Observation) -> float:
        (finding,) = exceeded(limits, observation, 1000.0)
        return finding.allowed

    assert allowed(seen(2)) == 90.0  # the third occurrence is warm-up
    assert allowed(seen(3)) == 2.0
    assert [allowed(seen(gaps)) for gaps in (8, 9, 10, 11, 12)] == [2.0, 60.0, 60.0, 60.0, 2.0]
    assert allowed(seen(50)) == 60.0
    assert allowed(seen(20, "warm")) == 60.0
    assert allowed(seen(20, aligned=())) == 60.0  # its phases may come elsewhere
