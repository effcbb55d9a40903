"""The mutants of the protocol (tests/mutate.py) that no general rule makes."""

from __future__ import annotations

from resilience.core import restart
from tests.mutate import BY_HAND, MADE_BY_HAND, mutants_of


def test_each_bug_that_is_put_in_by_hand_still_has_its_place_in_the_protocol() -> None:
    made = [mutant.function for mutant in mutants_of(restart) if mutant.change.startswith(MADE_BY_HAND)]
    assert sorted(made) == sorted(BY_HAND)
