"""Who gets which rank once some ranks are gone?

After an interruption every rank that goes on runs the assignment with the same terminated ranks and must
come to the same new world: ranks 0 to world_size-1, each given once. An assignment may also terminate
more ranks, as `FilterGroupedByKey` does, and leave it to the one after it to remove them. It may run in
a monitor on behalf of a rank that died meanwhile, so what it writes to the store must bear repetition.
The rules themselves are `core.assignment`'s."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from datetime import timedelta

from resilience.adapters.store import StoreLike, drive
from resilience.core import assignment, restart
from resilience.core.restart import Add, CompareSet, Protocol, Read, Seat, Set
from resilience.errors import BarrierTimeout, ConfigurationTypeError, RankDiscarded
from resilience.inprocess import options
from resilience.inprocess.state import State
from resilience.inprocess.store import CHUNK


class RankAssignment(ABC):
    """Gets this rank's state and the ranks, as numbered now, that do not go on; returns the new state and
    the terminated ranks that are left for the next assignment. May change the state it gets."""

    @abstractmethod
    def __call__(self, state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:
        """Assign a rank. Raises: RankDiscarded if this rank itself gets none."""


class ShiftRanks(RankAssignment):
    """Ranks move up: each becomes its number less the terminated ranks below it. Keeps the order.

    Of 0 1 2 3 4 5, with 1 and 4 terminated, 0 2 3 5 become 0 1 2 3."""

    def __call__(self, state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:
        return _seated(assignment.shift, state, terminated_ranks)


class FillGaps(RankAssignment):
    """The highest ranks take the places of terminated ones, in order; as few ranks as possible change.

    Of 0 1 2 3 4 5, with 1 and 4 terminated, 0 2 3 keep their numbers and 5 becomes 1."""

    def __call__(self, state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:
        return _seated(assignment.fill_gaps, state, terminated_ranks)


class FilterGroupedByKey(RankAssignment):
    """Terminates the ranks of every group that does not meet a condition, such as a node that lost a rank.

    Removes nobody itself: Compose(ShiftRanks(), FilterGroupedByKey(key, lambda count: count == 8)) filters
    first, then assigns.

    key_or_fn: the group of this rank: a value, or a function of (rank, world_size), in text equal on all
        its members and in its monitor.
    condition: gets the number of ranks that are left of a group; False terminates them all.
    timeout: for each of two meetings of all ranks that are left.
    Where there are several filters, all ranks must construct them in the same order.
    Raises: BarrierTimeout, StoreError; ConfigurationError."""

    _numbers = itertools.count()

    def __init__(
        self,
        key_or_fn: str | Callable[[int, int], str],
        condition: Callable[[int], bool],
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        if not callable(condition):
            raise ConfigurationTypeError(
                f"condition is {condition!r}, expected a function of the number of ranks that are left of a group, "
                "such as lambda count: count == 8",
                option="condition",
                value=condition,
            )
        self._limit = options.seconds("timeout", timeout)
        self._name = f"filter/{next(self._numbers)}"
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = timeout

    def __call__(self, state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:
        if state.rank in terminated_ranks:
            return state, terminated_ranks  # an earlier filter's: it is not counted any more
        key = self.key_or_fn(state.rank, state.world_size) if callable(self.key_or_fn) else self.key_or_fn
        store: StoreLike = state.store
        excluded = drive(self.excluded(str(key), state, terminated_ranks), store, chunk=CHUNK)
        return state, terminated_ranks | excluded

    def excluded(self, key: str, state: State, terminated: set[int]) -> Protocol[set[int]]:
        """The protocol of one rank: count the groups, meet, list the ranks of those that fail, meet, read
        the list. Only the list has more than one entry to transfer."""
        rank = state.rank
        key = yield CompareSet(f"{self._name}/key/{rank}", key)  # a stand-in goes by what the rank said
        group = f"{self._name}/group/{key}"
        # A rank is counted once whoever repeats this. If it is killed between the two operations its group
        # is counted one short, by all alike; the group has then lost that rank anyway.
        if (yield Add(f"{self._name}/counted/{rank}", 1)) == 1:
            yield Add(group, 1)
        place, count = _place(rank, terminated), state.world_size - len(terminated)
        yield from self._meet("counted", rank, place, count)
        members = yield Add(group, 0)
        if not self.condition(members):
            slot = yield Add(f"{self._name}/excluded", 1)
            yield Set(f"{self._name}/excluded/{slot}", str(rank))
        yield from self._meet("listed", rank, place, count)
        slots = yield Add(f"{self._name}/excluded", 0)
        listed = yield Read(tuple(f"{self._name}/excluded/{slot}" for slot in range(1, slots + 1)))
        return {int(text) for text in listed if text is not None}  # a killed writer's slot stays empty

    def _meet(self, when: str, rank: int, place: int, count: int) -> Protocol[None]:
        try:
            yield from restart.barrier(f"{self._name}/met/{when}", place, count, self._limit)
        except BarrierTimeout as error:
            raise BarrierTimeout(
                f"rank {rank} waited {self._limit:g} s (timeout of FilterGroupedByKey) for the {count} ranks that are "
                f"left, and not all came until their groups were {when}; a rank is lost or late",
                rank=rank,
                rendezvous_count=count,
                group_name=self._name,
                limit=self._limit,
            ) from error


def _place(rank: int, terminated: set[int]) -> int:
    """The number of ranks below `rank` that go on."""
    return rank - bisect_left(sorted(terminated), rank)


def _seated(
    rule: Callable[[Seat, frozenset[int]], Seat | None], state: State, terminated: set[int]
) -> tuple[State, set[int]]:
    """Give the state the seat that the rule finds. Raises: RankDiscarded if there is none."""
    seat = Seat(state.initial_rank, state.rank, state.world_size, state.active_world_size, state.iteration)
    following = rule(seat, frozenset(terminated))
    if following is None:
        raise RankDiscarded(
            f"rank {state.rank} (initially {state.initial_rank}) is terminated and gets no rank in the next iteration",
            rank=state.rank,
            initial_rank=state.initial_rank,
        )
    state.rank, state.world_size = following.rank, following.world_size
    return state, set()


__all__ = [
    "FillGaps",
    "FilterGroupedByKey",
    "RankAssignment",
    "RankDiscarded",
    "ShiftRanks",
]
