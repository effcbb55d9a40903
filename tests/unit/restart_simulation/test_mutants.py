"""The mutants of the protocol (tests/mutate.py) that no general rule makes."""

from __future__ import annotations

import pytest

from resilience.core import membership, restart
from resilience.errors import InternalError
from tests.launcher_simulation.jobs import Job
from tests.launcher_simulation.schedules import draw
from tests.mutate import BY_HAND, LATE, MADE_BY_HAND, Mutant, killer_of, mutants_of, mutated, planted
from tests.restart_simulation import faults
from tests.restart_simulation.cluster import Cluster


def test_each_bug_that_is_put_in_by_hand_still_has_its_place_in_the_protocol() -> None:
    assert sorted(mutant.function for mutant in _by_hand()) == sorted(BY_HAND)


def test_late_success_that_is_ignored_is_found_by_schedules_alone() -> None:
    (mutant,) = [each for each in _by_hand() if each.function == "_complete"]
    broken = {schedule for schedule in LATE if _broken_by(schedule, mutant) == "one outcome"}
    assert len(broken) >= 3
    assert len(LATE) <= 300
    for schedule in LATE:
        (late,) = schedule.faults
        assert isinstance(late, faults.Stall) and late.duration > 100.0  # once, that excused whatever such a rank met
    assert {_broken_by(schedule, None) for schedule in LATE} == {None}


def test_late_success_that_is_ignored_is_found_in_a_drawn_schedule_too() -> None:
    (mutant,) = [each for each in _by_hand() if each.function == "_complete"]
    schedule = faults.draw(2878)  # a rank returns after 119.976 s; about one drawn schedule in 2,700 finds the mutant
    assert (_broken_by(schedule, mutant), _broken_by(schedule, None)) == ("one outcome", None)


def test_bug_that_is_put_in_by_hand_is_judged_by_no_unit_test() -> None:
    for mutant in _by_hand():
        killer = killer_of(restart.__name__, mutant)
        assert killer is not None
        assert killer[0] == "one outcome"  # an invariant of the referee, not the name of a test


def test_agent_that_left_and_is_given_a_seat_is_found_by_the_simulation() -> None:
    (mutant,) = [each for each in mutants_of(membership) if each.change == "without arrived.pop(id, None)"]
    with (
        planted(membership, mutant),
        pytest.raises(InternalError, match=r"seats are for those who came|is forgotten|every schedule|others go on"),
    ):
        _run_schedules(200)
    _run_schedules(10)


def _run_schedules(count: int) -> None:
    for seed in range(count):
        Job(draw(seed)).run()


def _by_hand() -> list[Mutant]:
    return [mutant for mutant in mutants_of(restart) if mutant.change.startswith(MADE_BY_HAND)]


def _broken_by(schedule: faults.Schedule, mutant: Mutant | None) -> str | None:
    """Return the invariant that a schedule breaks with the mutant (None: with the protocol as it is), None if none."""
    try:
        Cluster(schedule, restart if mutant is None else mutated(restart, mutant)).run()
    except InternalError as error:
        return str(vars(error)["invariant"])
    return None
