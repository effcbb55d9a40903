"""After any loss the ranks that go on are 0 to world_size-1, each once, and all agree."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.core.restart import BLOCK
from resilience.errors import BarrierTimeout, ConfigurationError, ConfigurationTypeError, StoreError
from resilience.inprocess.rank_assignment import (
    FillGaps,
    FilterGroupedByKey,
    RankAssignment,
    RankDiscarded,
    ShiftRanks,
)
from resilience.inprocess.state import State
from tests.unit.inprocess.interleaving import interleaved

WORLDS = st.integers(1, 60).flatmap(
    lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), max_size=size))
)


def states(size: int) -> list[State]:
    return [State(rank=rank, world_size=size, initial_rank=rank + 100) for rank in range(size)]


def assigned(assignment: RankAssignment, size: int, terminated: set[int]) -> dict[int, int]:
    """The new rank of each old rank that goes on."""
    ranks = {}
    for state in states(size):
        old = state.rank
        if old not in terminated:
            after, left = assignment(state, set(terminated))
            assert left == set()
            assert after.world_size == size - len(terminated)
            assert after.initial_rank == old + 100
            ranks[old] = after.rank
    return ranks


@pytest.mark.parametrize("assignment", [ShiftRanks(), FillGaps()], ids=lambda one: type(one).__name__)
@given(world=WORLDS)
def test_remaining_ranks_are_consecutive_and_unique(assignment: RankAssignment, world: tuple[int, set[int]]) -> None:
    size, terminated = world
    ranks = assigned(assignment, size, terminated)
    assert sorted(ranks.values()) == list(range(size - len(terminated)))


@pytest.mark.parametrize("assignment", [ShiftRanks(), FillGaps()], ids=lambda one: type(one).__name__)
@given(world=WORLDS)
def test_terminated_rank_is_discarded(assignment: RankAssignment, world: tuple[int, set[int]]) -> None:
    size, terminated = world
    for rank in terminated:
        with pytest.raises(RankDiscarded, match=f"rank {rank} ") as raised:
            assignment(states(size)[rank], terminated)
        assert vars(raised.value)["rank"] == rank


@given(world=WORLDS)
def test_shifted_ranks_keep_their_order(world: tuple[int, set[int]]) -> None:
    ranks = assigned(ShiftRanks(), *world)
    assert [ranks[old] for old in sorted(ranks)] == sorted(ranks.values())


@given(world=WORLDS)
def test_filling_gaps_moves_only_ranks_that_have_no_place_any_more(world: tuple[int, set[int]]) -> None:
    size, terminated = world
    moved = {old for old, new in assigned(FillGaps(), size, terminated).items() if old != new}
    assert moved == {rank for rank in range(size - len(terminated), size) if rank not in terminated}


def test_examples_of_the_docs() -> None:
    assert assigned(ShiftRanks(), 6, {1, 4}) == {0: 0, 2: 1, 3: 2, 5: 3}
    assert assigned(FillGaps(), 6, {1, 4}) == {0: 0, 2: 2, 3: 3, 5: 1}


# -- groups -------------------------------------------------------------------------------------------


def filtered(
    group_of: Callable[[int], str],
    condition: Callable[[int], bool],
    size: int,
    terminated: set[int],
    seed: int,
    kill: tuple[int, int] | None = None,
) -> tuple[list[set[int]], Any]:
    """What each remaining rank takes for excluded, and the store."""
    one = FilterGroupedByKey("by the test", condition)
    going_on = [state for state in states(size) if state.rank not in terminated]
    begins = {state.rank: partial(one.excluded, group_of(state.rank), state, terminated) for state in going_on}
    results, store = interleaved(begins, random.Random(seed), kill=kill)
    assert len(results) == len(going_on)
    return list(results.values()), store


def expected(
    group_of: Callable[[int], str], condition: Callable[[int], bool], size: int, terminated: set[int]
) -> set[int]:
    left = [rank for rank in range(size) if rank not in terminated]
    counts = {rank: sum(group_of(other) == group_of(rank) for other in left) for rank in left}
    return {rank for rank in left if not condition(counts[rank])}


@given(world=WORLDS, whole=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_groups_that_fail_the_condition_are_excluded_by_all_alike(
    world: tuple[int, set[int]], whole: int, seed: int
) -> None:
    size, terminated = world

    def group_of(rank: int) -> str:
        return f"node {rank // whole}/ü\n"

    results, _ = filtered(group_of, lambda count: count == whole, size, terminated, seed)
    want = expected(group_of, lambda count: count == whole, size, terminated)
    assert all(result == want for result in results)


@given(
    world=WORLDS.filter(lambda world: len(world[1]) < world[0]),
    whole=st.integers(1, 4),
    operation=st.integers(1, 14),
    seed=st.integers(0, 2**32),
)
def test_rank_killed_at_any_operation_is_stood_in_for(
    world: tuple[int, set[int]], whole: int, operation: int, seed: int
) -> None:
    size, terminated = world
    victim = random.Random(seed).choice([rank for rank in range(size) if rank not in terminated])

    def group_of(rank: int) -> str:
        return str(rank // whole)

    results, _ = filtered(group_of, lambda count: count == whole, size, terminated, seed, (victim, operation))
    want = expected(group_of, lambda count: count == whole, size, terminated)
    counted_short = {rank for rank in range(size) if group_of(rank) == group_of(victim) and rank not in terminated}
    assert all(result == results[0] for result in results)
    assert results[0] in (want, want | counted_short)


def test_stand_in_elsewhere_goes_by_the_group_that_its_rank_named() -> None:
    """A neighbour's monitor stands in for a rank of a lost node: asked for the host name it answers its own."""
    pairs = FilterGroupedByKey("x", lambda count: count == 2)
    world = states(4)
    begins = {state.rank: partial(pairs.excluded, f"node {state.rank // 2}", state, set()) for state in world}
    names = iter(["node 0", "node 1"])
    begins[1] = lambda: pairs.excluded(next(names), world[1], set())  # type: ignore[assignment]
    results, _ = interleaved(begins, random.Random(4), kill=(1, 1))
    assert next(names, None) is None
    assert all(result == set() for result in results.values())


def test_no_rank_reads_more_than_a_block_and_the_excluded() -> None:
    size = 300
    results, store = filtered(lambda rank: "all", lambda count: count == size, size, set(), 1)
    assert all(result == set() for result in results)
    assert store.widest <= BLOCK


def test_two_filters_do_not_mix_up_their_counts() -> None:
    pairs = FilterGroupedByKey("x", lambda count: count == 2)
    world = states(3)
    begins = {state.rank: partial(pairs.excluded, str(state.rank // 2), state, set()) for state in world}
    first, store = interleaved(begins, random.Random(1))
    assert all(result == {2} for result in first.values())
    singles = FilterGroupedByKey("x", lambda count: count == 1)
    left = {state.rank: partial(singles.excluded, str(state.rank), state, {2}) for state in world[:2]}
    second, _ = interleaved(left, random.Random(2), store)
    assert all(result == set() for result in second.values())


def test_missing_rank_ends_the_filter_with_a_clear_error() -> None:
    one = FilterGroupedByKey("x", lambda count: True, timeout=timedelta(seconds=7))
    world = states(3)[:2]
    begins = {state.rank: partial(one.excluded, "x", state, set()) for state in world}
    results, _ = interleaved(begins, random.Random(3))
    assert all(isinstance(result, BarrierTimeout) and "7 s" in str(result) for result in results.values())


def test_rank_that_leaves_the_filter_with_an_exception_keeps_no_other_rank_waiting() -> None:
    pairs = FilterGroupedByKey("x", lambda count: count == 2)
    world = states(3)
    begins: dict[int, Any] = {state.rank: partial(pairs.excluded, "x", state, set()) for state in world}
    begins[1] = partial(pairs._absent, world[1], set())
    results, _ = interleaved(begins, random.Random(5))
    assert results == {0: set(), 1: None, 2: set()}


def test_filter_whose_store_is_gone_raises_what_the_key_raised() -> None:
    def interrupted(rank: int, world_size: int) -> str:
        raise KeyboardInterrupt

    state = State(rank=0, world_size=2)
    state.store = mock.Mock(**dict.fromkeys(("set.side_effect", "check.side_effect"), RuntimeError("gone")))
    with pytest.raises(KeyboardInterrupt):
        FilterGroupedByKey(interrupted, bool)(state, set())
    assert state.store.method_calls


def test_child_that_a_key_function_forks_does_not_touch_its_parents_store(tmp_path: Path) -> None:
    def fork_and_fail(rank: int, world_size: int) -> str:
        if os.fork() == 0:
            raise KeyboardInterrupt
        os.wait()
        return "x"

    class Gone:
        def __getattr__(self, name: str) -> Any:
            with (tmp_path / "asked-by").open("a") as file:
                file.write(f"{os.getpid()}\n")
            raise RuntimeError("gone")

    parent, state = os.getpid(), State(rank=0, world_size=2)
    state.store = Gone()  # type: ignore[assignment]
    try:
        with pytest.raises(StoreError):
            FilterGroupedByKey(fork_and_fail, bool)(state, set())
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert set((tmp_path / "asked-by").read_text().split()) == {str(parent)}


def test_rank_that_an_earlier_filter_terminated_takes_no_part() -> None:
    asked: list[int] = []

    def group_of(rank: int, size: int) -> str:
        asked.append(rank)
        return "x"

    one = FilterGroupedByKey(group_of, lambda count: True)
    assert one(State(rank=1, world_size=3), {1, 2}) == (State(rank=1, world_size=3), {1, 2})
    assert asked == []


@pytest.mark.parametrize("timeout", [60, 1.5, None, "60"])
def test_duration_of_a_wrong_type_is_refused(timeout: Any) -> None:
    with pytest.raises(ConfigurationTypeError, match=r"timedelta\(seconds=") as raised:
        FilterGroupedByKey("x", lambda count: True, timeout)
    assert isinstance(raised.value, TypeError)


def test_other_unusable_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="more than 0 s"):
        FilterGroupedByKey("x", lambda count: True, timedelta(0))
    with pytest.raises(ConfigurationTypeError, match="condition is 8"):
        FilterGroupedByKey("x", 8)  # type: ignore[arg-type]
