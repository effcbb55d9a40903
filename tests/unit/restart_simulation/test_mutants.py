"""The mutants of the protocol (tests/mutate.py) that no general rule makes."""

from __future__ import annotations

import pytest

from resilience.core import membership, restart
from resilience.errors import InternalError
from tests.launcher_simulation.jobs import Job
from tests.launcher_simulation.schedules import draw
from tests.mutate import BY_HAND, MADE_BY_HAND, mutants_of, planted


def test_each_bug_that_is_put_in_by_hand_still_has_its_place_in_the_protocol() -> None:
    made = [mutant.function for mutant in mutants_of(restart) if mutant.change.startswith(MADE_BY_HAND)]
    assert sorted(made) == sorted(BY_HAND)


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
