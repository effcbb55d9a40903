"""Which seat a rank gets from its assignment and its filter, and what they must not do."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from resilience.core.restart import Assign, Unassigned
from resilience.errors import InternalError
from resilience.facts.seats import Seat
from resilience.inprocess._runtime.assigning import assign, seat_within
from resilience.inprocess.hook_store import CallStore
from resilience.inprocess.rank_assignment import RankAssignment, ShiftRanks
from resilience.inprocess.rank_filter import RankFilter
from resilience.inprocess.state import State


class Beyond(RankAssignment):
    """Gives a rank that the world does not have."""

    def __call__(self, state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:
        state.rank = state.world_size
        return state, set()


class More(RankFilter):
    """Activates more ranks than there are."""

    def __call__(self, state: State) -> State:
        state.active_world_size = state.world_size + 1
        return state


class ReturnsPair(RankAssignment):
    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def __call__(self, state: State, terminated_ranks: set[int]) -> Any:
        return self.returned


class ReturnsNone(RankFilter):
    def __call__(self, state: State) -> Any:
        return None


class Hooks:
    def __init__(self, rank_assignment: RankAssignment | None, rank_filter: RankFilter | None) -> None:
        self.rank_assignment = rank_assignment
        self.rank_filter = rank_filter


@pytest.mark.parametrize(("assignment", "rank_filter"), [(Beyond(), None), (ShiftRanks(), More())])
def test_hook_that_breaks_an_invariant_of_the_world_is_an_internal_error(
    assignment: RankAssignment, rank_filter: RankFilter | None
) -> None:
    with pytest.raises(InternalError, match=r"expected 0 <= rank < world size and 0 <= active <= world size"):
        assign(Hooks(assignment, rank_filter), State(rank=1, world_size=4), frozenset())


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"the rank_assignment <.*ReturnsPair.*> returned None, expected \(state, terminated_ranks\)"),
        ((None, set()), r"rank_assignment <.*> returned \(None, set\(\)\), expected"),
    ],
)
def test_assignment_that_returns_something_else_is_named(returned: Any, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        assign(Hooks(ReturnsPair(returned), None), State(rank=1, world_size=4), frozenset())


def test_filter_that_returns_something_else_is_named() -> None:
    with pytest.raises(InternalError, match=r"the rank_filter <.*ReturnsNone.*> returned None, expected the state"):
        assign(Hooks(None, ReturnsNone()), State(rank=1, world_size=4), frozenset())


def test_hooks_that_do_not_return_in_time_leave_the_rank_unassigned() -> None:
    over = threading.Event()

    class Waits(RankFilter):
        def __call__(self, state: State) -> State:
            over.wait(60)
            return state

    store = CallStore("", dist.HashStore(), lambda *_: None)
    operation = Assign(Seat(3, 1, 4, 4, 0), frozenset((0,)))
    try:
        assert seat_within(0.05, Hooks(ShiftRanks(), Waits()), operation, store, 5) == Unassigned(5)
    finally:
        over.set()
    assert seat_within(60.0, Hooks(ShiftRanks(), Waits()), operation, store, 5) == Seat(3, 0, 3, 3, 1)
