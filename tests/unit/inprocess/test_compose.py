"""Several hooks make one of their kind; the last one runs first."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest

from resilience.errors import ConfigurationError, ConfigurationTypeError
from resilience.inprocess.abort import Abort
from resilience.inprocess.compose import Compose
from resilience.inprocess.finalize import Finalize, ThreadedFinalize
from resilience.inprocess.health_check import FaultCounter, HealthCheck
from resilience.inprocess.initialize import Initialize, RetryController
from resilience.inprocess.rank_assignment import FillGaps, RankAssignment, ShiftRanks
from resilience.inprocess.rank_filter import MaxActiveWorldSize, RankFilter, WorldSizeDivisibleBy
from resilience.inprocess.state import State


class Noting(Initialize, Abort):
    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def __call__(self, state: State) -> State:
        self.notes.append(self.name)
        return State(rank=0, world_size=state.world_size + 1)


class Silent(HealthCheck):
    """As users write them: it returns nothing."""

    def __call__(self, state: State, exc: Exception | None) -> Any:
        state.iteration = 7


class Replacing(HealthCheck, Finalize):
    def __call__(self, state: State, exc: Exception | None) -> tuple[State, Exception | None]:
        return state, KeyError("replaced")


class Plain:
    """Not abstract: a user's own callable."""

    def __call__(self, value: int) -> int:
        return value + 1


class Left(Plain): ...


class Right(Plain): ...


def state() -> State:
    return State(rank=0, world_size=1)


def test_last_hook_runs_first_and_results_are_handed_on() -> None:
    notes: list[str] = []
    composed = Compose(Noting("a", notes), Noting("b", notes), Noting("c", notes))
    assert composed(state()).world_size == 4
    assert notes == ["c", "b", "a"]


def test_pairs_are_handed_on_as_two_arguments() -> None:
    counter = FaultCounter()
    after, exc = Compose(counter, Replacing())(state(), None)
    assert after == state()
    assert isinstance(exc, KeyError)
    assert counter.faults_count == 1


def test_hook_that_returns_nothing_hands_on_what_it_got() -> None:
    error = ValueError()
    with pytest.warns(UserWarning, match="Silent object at .* returned None inside a Compose"):
        after, exc = Compose(FaultCounter(), Silent())(state(), error)
    assert (after.iteration, exc) == (7, error)
    with pytest.warns(UserWarning, match="Return them"):
        assert Compose(Silent())(after, error) == (after, error)


def test_hook_without_arguments_may_return_nothing() -> None:
    assert Compose(lambda: None, lambda: None)() is None


def test_terminated_ranks_are_handed_on() -> None:
    world = State(rank=3, world_size=4)
    after, left = Compose(FillGaps(), ShiftRanks())(world, {1})
    assert (after.rank, after.world_size, left) == (2, 3, set())


@pytest.mark.parametrize(
    ("instances", "kinds", "others"),
    [
        ((RetryController(), Noting("", [])), (Initialize,), (Abort, RankFilter)),
        ((Noting("", []), Noting("", [])), (Noting, Initialize, Abort), (Finalize,)),
        ((Replacing(), FaultCounter()), (HealthCheck,), (Finalize,)),
        ((ShiftRanks(), FillGaps()), (RankAssignment,), (ShiftRanks, FillGaps)),
        ((MaxActiveWorldSize(3), WorldSizeDivisibleBy(2)), (RankFilter,), (RankAssignment,)),
        ((Compose(ShiftRanks(), FillGaps()), Compose(FillGaps(), ShiftRanks())), (RankAssignment,), (FillGaps,)),
        ((ThreadedFinalize(timedelta(seconds=1), print), Replacing()), (Finalize,), (HealthCheck, ThreadedFinalize)),
        ((ThreadedFinalize(timedelta(seconds=1), print),) * 2, (Finalize, ThreadedFinalize), (HealthCheck,)),
        ((ShiftRanks(), RetryController()), (), (RankAssignment, Initialize)),
        ((Left(), Right()), (Plain,), (Left, Right)),
        ((Left(), Left()), (Left, Plain), (Right,)),
        ((print, print), (), (Plain,)),
    ],
)
def test_composed_hook_is_of_the_kinds_its_parts_share(
    instances: tuple[Any, ...], kinds: tuple[type, ...], others: tuple[type, ...]
) -> None:
    composed = Compose(*instances)
    assert [kind for kind in kinds if not isinstance(composed, kind)] == []
    assert [kind for kind in others if isinstance(composed, kind)] == []
    assert isinstance(composed, Compose)  # type: ignore[arg-type]


def test_composed_hooks_can_be_sent_to_a_monitor() -> None:
    copy = pickle.loads(pickle.dumps(Compose(ShiftRanks(), Compose(FillGaps()))))
    assert isinstance(copy, RankAssignment)
    assert copy(State(rank=2, world_size=3), {0})[0].rank == 0
    assert repr(copy).startswith("Compose(<")


def test_what_cannot_be_composed_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nothing to join"):
        Compose()
    with pytest.raises(ConfigurationTypeError, match="construct it"):
        Compose(ShiftRanks, FillGaps())
    with pytest.raises(ConfigurationTypeError, match="cannot be called"):
        Compose(ShiftRanks(), 3)
