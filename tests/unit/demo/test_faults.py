"""The demonstration's schedule: what is asked for happens, what is left open is drawn, the rest is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.demo.faults import KINDS, DemoFault, schedule
from resilience.errors import ConfigurationError


def test_three_kinds_are_planned_unasked() -> None:
    assert [fault.kind for fault in schedule([], ranks=4, steps=200, seed=0)] == ["exception", "kill", "hang"]


def test_what_is_asked_for_is_planned_in_the_order_of_steps() -> None:
    planned = schedule(["kill@40:1", "hang@20:0"], ranks=2, steps=60, seed=0)
    assert planned == (DemoFault("hang", 20, 0), DemoFault("kill", 40, 1))


def test_none_plans_nothing() -> None:
    assert schedule(["none"], ranks=4, steps=60, seed=0) == ()


def test_same_seed_draws_the_same_and_another_one_something_else() -> None:
    first, again, other = (schedule([], ranks=4, steps=200, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


@given(
    texts=st.lists(st.sampled_from([*KINDS, "kill@1", "hang@19:1", "exception@10"]), max_size=2, unique=True),
    ranks=st.integers(2, 16),
    steps=st.integers(20, 300),
    seed=st.integers(0, 10**9),
)
def test_every_fault_has_a_step_of_its_own_within_the_run(texts: list[str], ranks: int, steps: int, seed: int) -> None:
    if not texts and steps < 30:
        return  # three faults need 30 steps
    planned = schedule(texts, ranks, steps, seed)
    assert len(planned) == len({fault.step for fault in planned}) == len(texts or KINDS)
    assert all(1 <= fault.step < steps and 0 <= fault.rank < ranks for fault in planned)


@pytest.mark.parametrize(
    ("texts", "allowed"),
    [
        (["explode"], "exception, kill, hang"),
        (["kill@x"], "KIND@STEP:RANK"),
        (["kill@" + "9" * 5000], "KIND@STEP:RANK"),
        (["kill@60"], "1 to 59"),
        (["kill@0"], "1 to 59"),
        (["kill@10:4"], "0 to 3"),
        (["kill@10", "hang@10"], "its own step"),
        (["none", "kill"], "only `none`"),
        (["kill"] * 7, "the limit is 6"),
    ],
)
def test_what_is_not_allowed_is_answered_with_what_is(texts: list[str], allowed: str) -> None:
    with pytest.raises(ConfigurationError, match=allowed):
        schedule(texts, ranks=4, steps=60, seed=0)
