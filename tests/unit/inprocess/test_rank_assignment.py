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

from resilience.core import restart
from resilience.core.restart import BLOCK, Await, Keys, Protocol
from resilience.errors import BarrierTimeout, ConfigurationError, ConfigurationTypeError, StoreError
from resilience.facts.seats import Seat
from resilience.inprocess.rank_assignment import (
    COUNTED,
    LISTED,
    FillGaps,
    FilterGroupedByKey,
    RankAssignment,
    RankDiscarded,
    ShiftRanks,
)
from resilience.inprocess.state import State
from tests.unit.inprocess.interleaving import MemoryStore, interleaved

WORLDS = st.integers(1, 60).flatmap(
    lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), max_size=size))
)


def states(size: int) -> list[State]:
    return [State(rank=rank, world_size=size, initial_rank=rank + 100) for rank in range(size)]


def seat(state: State) -> Seat:
    return Seat(state.initial_rank, state.rank, state.world_size, state.world_size, 0)


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
    begins = {
        state.rank: partial(one.excluded, group_of(state.rank), state, terminated, seat(state)) for state in going_on
    }
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
    begins = {
        state.rank: partial(pairs.excluded, f"node {state.rank // 2}", state, set(), seat(state)) for state in world
    }
    names = iter(["node 0", "node 1"])
    begins[1] = lambda: pairs.excluded(next(names), world[1], set(), seat(world[1]))  # type: ignore[assignment]
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
    begins = {state.rank: partial(pairs.excluded, str(state.rank // 2), state, set(), seat(state)) for state in world}
    first, store = interleaved(begins, random.Random(1))
    assert all(result == {2} for result in first.values())
    singles = FilterGroupedByKey("x", lambda count: count == 1)
    left = {state.rank: partial(singles.excluded, str(state.rank), state, {2}, seat(state)) for state in world[:2]}
    second, _ = interleaved(left, random.Random(2), store)
    assert all(result == set() for result in second.values())


def test_missing_rank_ends_the_filter_with_a_clear_error() -> None:
    one = FilterGroupedByKey("x", lambda count: True, timeout=timedelta(seconds=7))
    world = states(3)[:2]
    begins = {state.rank: partial(one.excluded, "x", state, set(), seat(state)) for state in world}
    results, _ = interleaved(begins, random.Random(3))
    assert all(isinstance(result, BarrierTimeout) and "7 s" in str(result) for result in results.values())


def test_rank_that_leaves_the_filter_with_an_exception_keeps_no_other_rank_waiting() -> None:
    pairs = FilterGroupedByKey("x", lambda count: count == 2)
    world = states(3)
    begins: dict[int, Any] = {state.rank: partial(pairs.excluded, "x", state, set(), seat(state)) for state in world}
    begins[1] = partial(pairs._absent, world[1], set(), seat(world[1]))
    for seed in range(20):
        results, _ = interleaved(begins, random.Random(seed))
        assert results == {0: frozenset(), 1: None, 2: frozenset()}


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


@given(size=st.integers(2, 40), whole=st.integers(1, 8), absent=st.sets(st.integers(0, 39)), seed=st.integers(0, 2**32))
def test_ranks_whose_assignment_failed_keep_no_other_rank_waiting(
    size: int, whole: int, absent: set[int], seed: int
) -> None:
    """They fail before the first filter, in it, or between the two. All others decide alike, and as for lost ranks."""
    chance = random.Random(seed)
    nodes = FilterGroupedByKey("node", lambda count: count == whole)
    halves = FilterGroupedByKey("half", lambda count: count >= size // 2)
    world = states(size)

    def assign(state: State, fails_at: int) -> Protocol[frozenset[int] | None]:
        excluded: frozenset[int] = frozenset()
        for position, (one, key) in enumerate(((nodes, state.rank // whole), (halves, state.rank < size // 2))):
            if position == fails_at or state.rank in excluded:
                break
            excluded |= yield from one.excluded(str(key), state, set(excluded), seat(state))
        if fails_at < 2:
            yield from restart.enlist(Keys(1).unassigned_ranks, state.rank)
            return None
        return excluded

    fails_at = {rank: chance.randrange(2) if rank in absent else 2 for rank in range(size)}
    begins = {state.rank: partial(assign, state, fails_at[state.rank]) for state in world}
    results, _ = interleaved(begins, chance)
    remaining = {rank for rank in range(size) if fails_at[rank] > 0}
    first = {rank for rank in range(size) if sum(other // whole == rank // whole for other in remaining) != whole}
    for rank in range(size):
        if fails_at[rank] == 2:
            assert not isinstance(results[rank], Exception)
            assert results[rank] & remaining >= first & remaining
    going_on = {results[rank] for rank in range(size) if fails_at[rank] == 2 and rank not in results[rank]}
    assert len(going_on) <= 1


@pytest.mark.parametrize(
    ("unassigned", "world_size", "renumbered", "is_over"),
    [("0", 4, None, False), ("1", 4, None, False), ("2", 4, None, True), ("2", 5, None, False), ("2", 4, 3, False)],
    ids=["terminated before", "has arrived", "is missing", "ranks were removed", "ranks were exchanged"],
)
def test_filter_waits_for_every_rank_whose_assignment_has_not_failed(
    unassigned: str, world_size: int, renumbered: int | None, is_over: bool
) -> None:
    """Ranks 1 and 3 meet; rank 2 does not come, and rank 0 is terminated. world_size: before the assignment."""
    one = FilterGroupedByKey("x", lambda count: count == 2, timeout=timedelta(seconds=7))
    store = MemoryStore({"1/unassigned_ranks": "1", "1/unassigned_ranks/1": unassigned, "2/unassigned_ranks": "0"})
    begins = {
        rank: partial(one.excluded, "x", states(4)[rank], {0}, Seat(rank, rank, world_size, 4, 0)) for rank in (1, 3)
    }
    if renumbered is not None:
        begins[renumbered] = partial(one.excluded, "x", states(4)[renumbered], {0}, Seat(2, 2, 4, 4, 0))
    results, _ = interleaved(begins, random.Random(3), store)
    assert [results[rank] == frozenset() for rank in (1, 3)] == [is_over] * 2
    assert [isinstance(results[rank], BarrierTimeout) for rank in (1, 3)] == [not is_over] * 2


class Actor:
    """One rank whose operations are performed one at a time."""

    def __init__(self, steps: Protocol[Any], store: MemoryStore) -> None:
        self.steps, self.store = steps, store
        self.pending: Any = steps.send(None)
        self.result: Any = None

    def perform(self) -> None:
        is_wait = isinstance(self.pending, Await)
        answer = self.pending.key in self.store.data if is_wait else self.store.perform(self.pending)
        try:
            self.pending = self.steps.send(answer)
        except StopIteration as stop:
            self.pending, self.result = None, stop.value

    def run_to_wait(self, key: str) -> None:
        """Go on until it waits for a key whose name ends like this, or to the end."""
        while self.pending is not None and not (isinstance(self.pending, Await) and self.pending.key.endswith(key)):
            self.perform()


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("operations", range(20))
def test_place_of_a_healthy_rank_is_not_taken_for_that_of_a_failed_one(operations: int, raises: bool) -> None:
    """Ranks 1 and 2 have been exchanged. Rank 1, which has failed, or its stand-in arrives late at place 2. The slow
    rank 2 has place 1."""
    one = FilterGroupedByKey("x", lambda count: count == 2)
    store = MemoryStore({"1/unassigned_ranks": "1", "1/unassigned_ranks/1": "1"})
    world = states(4)
    waiting, looking = (Actor(one.excluded("x", world[rank], set(), seat(world[rank])), store) for rank in (3, 0))
    for actor in (waiting, looking):
        actor.run_to_wait(f"{COUNTED}/done")
    for _ in range(operations):
        looking.perform()
    late = (
        one._absent(world[2], set(), seat(world[1])) if raises else one.excluded("x", world[2], set(), seat(world[1]))
    )
    Actor(late, store).run_to_wait(f"{COUNTED}/done")
    for _ in range(30):
        looking.perform()
    assert f"0/{one._name}/{COUNTED}/done" not in store.data


@pytest.mark.parametrize("late", [None, 5, 39, 1000, 2047])
def test_look_for_arrivals_takes_few_operations_at_any_size(late: int | None) -> None:
    """2,048 ranks are two full levels. late: a rank that has not arrived."""
    size, failed = 2048, 40
    one = FilterGroupedByKey("x", lambda count: count == size - 1)
    store = MemoryStore({"1/unassigned_ranks": "1", "1/unassigned_ranks/1": str(failed)})
    done = f"0/{one._name}/{COUNTED}/done"
    for rank in set(range(size)) - {failed, late, 0}:
        Actor(restart.arrive(done.removesuffix("/done"), rank, size), store).run_to_wait("done")
    state = State(rank=0, world_size=size, initial_rank=100)
    looks = Actor(one.excluded("x", state, set(), seat(state)), store)
    looks.run_to_wait("done")
    for _ in range(20):
        looks.perform()
    arrived_for = done.removesuffix("done") + f"0/{failed}"
    assert [key in store.data for key in (done, arrived_for)] == [late is None] * 2
    assert store.widest <= BLOCK


def test_stand_in_that_comes_when_the_others_have_gone_on_changes_nothing_for_them() -> None:
    """Its rank would be excluded, and a slow rank would read that."""
    one = FilterGroupedByKey("x", lambda count: count >= 2)
    store = MemoryStore({"1/unassigned_ranks": "1", "1/unassigned_ranks/1": "2"})
    first, slow, late = (
        Actor(one.excluded(node, state, set(), seat(state)), store)
        for node, state in zip(("node 0", "node 0", "node 1"), states(3), strict=True)
    )
    for actor in (first, slow):
        actor.run_to_wait("done")
    slow.run_to_wait("frozen")
    for actor in (first, late, slow):
        actor.run_to_wait("nothing else")
        assert actor.result == frozenset()
    assert store.data[f"0/{one._name}/excluded/1"] == "2"


def test_rank_that_leaves_the_filter_last_lets_the_others_read_the_list() -> None:
    one = FilterGroupedByKey("x", lambda count: count == 3)
    store = MemoryStore()
    first, second, leaving = states(3)
    others = [Actor(one.excluded("x", state, set(), seat(state)), store) for state in (first, second)]
    leaves = Actor(one._absent(leaving, set(), seat(leaving)), store)
    for actor in others:
        actor.run_to_wait("done")
    while f"0/{one._name}/{COUNTED}/done" not in store.data:
        leaves.perform()
    for actor in others:
        actor.run_to_wait("frozen")
    leaves.run_to_wait("nothing else")
    for actor in others:
        actor.run_to_wait("nothing else")
        assert actor.result == {0, 1}


def test_list_is_read_although_the_rank_that_came_last_is_lost_before_it_has_frozen_it() -> None:
    one = FilterGroupedByKey("x", lambda count: count == 2)
    store = MemoryStore()
    ranks = [Actor(one.excluded("x", state, set(), seat(state)), store) for state in states(2)]
    ranks[0].run_to_wait("done")
    ranks[1].run_to_wait("frozen")
    while f"0/{one._name}/{LISTED}/done" not in store.data:
        ranks[0].perform()
    for _ in range(20):
        ranks[1].perform()
        if ranks[1].pending is None:
            break
    assert ranks[1].result == frozenset()


def test_group_is_excluded_as_a_whole_although_a_late_stand_in_counts_its_rank_meanwhile() -> None:
    one = FilterGroupedByKey("x", lambda count: count >= 3)
    world = states(3)
    store = MemoryStore({"1/unassigned_ranks": "1", "1/unassigned_ranks/1": "2"})
    ranks = [Actor(one.excluded("node", state, set(), seat(state)), store) for state in world]
    for rank in (0, 1):
        ranks[rank].run_to_wait(f"{COUNTED}/done")
    for rank in (0, 2, 1):  # two of three are counted when rank 0 reads the count
        ranks[rank].run_to_wait("frozen")
    for actor in ranks:
        actor.run_to_wait("nothing else")
        assert actor.result == {0, 1, 2}


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
