"""Which rank does each process get after some ranks are gone?

After an interruption every remaining rank runs the assignment with the same terminated ranks. All must compute
the same new world: ranks 0 to world_size-1, each given once. An assignment may also terminate more ranks, as
`FilterGroupedByKey` does, and leave their removal to the next assignment. A monitor may run it for a rank that
died meanwhile, so its writes to the store must be repeatable. The rules themselves are in `core.assignment`."""

from __future__ import annotations

import contextlib
import itertools
import os
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from datetime import timedelta
from typing import TYPE_CHECKING

from resilience.core import assignment, restart
from resilience.core.restart import Add, Await, Check, CompareSet, Protocol, Read, Set
from resilience.errors import BarrierTimeout, ConfigurationTypeError, RankDiscarded, StoreError
from resilience.facts.seats import Seat
from resilience.inprocess._runtime import options
from resilience.inprocess.hook_store import IterationStore
from resilience.inprocess.later_releases import missing
from resilience.inprocess.state import State
from resilience.inprocess.store import CHUNK
from resilience.system.store import StoreLike, drive

COUNTED, LISTED = "counted", "listed"  # the two steps of a filter after which all remaining ranks meet


class RankAssignment(ABC):
    """Receives this rank's state and the terminated ranks (present numbers). Returns the new state and the
    terminated ranks that the next assignment still has to remove. May change the state that it receives."""

    @abstractmethod
    def __call__(self, state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:
        """Assign a rank. Raises: RankDiscarded if this rank itself gets no new one."""


class ShiftRanks(RankAssignment):
    """Closes gaps: each rank is lowered by the number of terminated ranks below it. Keeps the order.

    Of 0 1 2 3 4 5, with 1 and 4 terminated, 0 2 3 5 become 0 1 2 3."""

    def __call__(self, state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:
        return _seated(assignment.shift, state, terminated_ranks)


class FillGaps(RankAssignment):
    """Moves the highest ranks into the places of terminated ones, in order. As few ranks as possible change.

    Of 0 1 2 3 4 5, with 1 and 4 terminated, 0 2 3 keep their numbers and 5 becomes 1."""

    def __call__(self, state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:
        return _seated(assignment.fill_gaps, state, terminated_ranks)


class FilterGroupedByKey(RankAssignment):
    """Terminates all ranks of every group that does not meet a condition, such as a node that lost a rank.

    Does not remove them from the world: Compose(ShiftRanks(), FilterGroupedByKey(key, lambda count: count == 8))
    filters first, then assigns.

    key_or_fn: the group of this rank: a value, or a function of (rank, world_size). Its text must be equal on
        all members of the group and in their monitors.
    condition: receives the number of remaining ranks of a group; False terminates them all.
    timeout: limit of each of the two barriers among all remaining ranks. The Wrapper's hard_timeout bounds them too.
        They do not wait for a rank whose assignment raises in the filter, nor for one that has raised before it,
        unless an assignment has given ranks other numbers before the filter.
    If there are several filters, all ranks must construct them in the same order.
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
                f"condition is {condition!r}, expected a function of the number of remaining ranks of a group, "
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
            return state, terminated_ranks  # an earlier filter terminated it: it no longer counts
        seat, store = _before(state)
        pid = os.getpid()
        try:
            key = self.key_or_fn(state.rank, state.world_size) if callable(self.key_or_fn) else self.key_or_fn
            excluded = drive(self.excluded(str(key), state, terminated_ranks, seat), store, chunk=CHUNK)
        except BaseException:  # of key_or_fn, condition, the store or a signal handler
            if os.getpid() == pid:  # a child that key_or_fn forked leaves its parent's store alone
                with contextlib.suppress(StoreError):
                    drive(self._absent(state, terminated_ranks, seat), store)
            raise
        return state, terminated_ranks | excluded

    def excluded(self, key: str, state: State, terminated: set[int], seat: Seat) -> Protocol[frozenset[int]]:
        """Run the protocol of one rank: count the groups, meet, list the ranks of groups that fail, meet, and read the
        list. Both the counts and the list stay as they are once they have been read: a stand-in may repeat all of this
        later. seat: the rank's place before the assignment."""
        rank, name = state.rank, self._key(seat)
        yield from _note_number(state, seat)
        key = yield CompareSet(f"{name}/key/{rank}", key)  # a stand-in uses the key that the rank wrote
        group = f"{name}/group/{key}"
        # A rank counts once even if its stand-in repeats this. If it is killed between the two operations, all ranks
        # see one member too few in its group; the group has lost that rank anyway.
        if (yield Add(f"{name}/counted/{rank}", 1)) == 1:
            yield Add(group, 1)
        yield from self._meet(COUNTED, f"{name}/{COUNTED}/done", state, terminated, seat)
        count = yield Add(group, 0)
        members = yield CompareSet(f"{name}/members/{key}", str(count))
        if not self.condition(int(members)):
            yield from restart.enlist(f"{name}/excluded", rank)
        if (yield from self._meet(LISTED, f"{name}/frozen", state, terminated, seat)):
            frozen = yield from restart.freeze(f"{name}/excluded", f"{name}/frozen")
        else:
            (frozen,) = yield Read((f"{name}/frozen",))
        return restart.ranks_of(frozen)

    def _key(self, seat: Seat) -> str:
        return f"{seat.iteration}/{self._name}"

    def _absent(self, state: State, terminated: set[int], seat: Seat) -> Protocol[None]:
        """Arrive at both barriers for a rank that leaves the filter with an exception: the others must not wait."""
        place, count = _place(state.rank, terminated), state.world_size - len(terminated)
        yield from _note_number(state, seat)
        for step in (COUNTED, LISTED):
            yield from restart.arrive(f"{self._key(seat)}/{step}", place, count)

    def _meet(self, step: str, key: str, state: State, terminated: set[int], seat: Seat) -> Protocol[bool]:
        """Wait for `key`, which is written once all remaining ranks have arrived at a step, except those whose
        assignment fails meanwhile. Return True if this rank completed the step. Raises: BarrierTimeout."""
        name, count = f"{self._key(seat)}/{step}", state.world_size - len(terminated)
        is_complete = yield from restart.arrive(name, _place(state.rank, terminated), count)
        waited, pause = 0.0, restart.LOOK_AGAIN
        while not is_complete and waited < self._limit:
            if (yield Await(key, min(pause, self._limit - waited))):
                return False
            waited, pause = waited + pause, min(2 * pause, CHUNK)
            is_complete = yield Check((f"{name}/done",))  # the rank that completed it may be lost since then
            failed = (yield from restart.unassigned_after(seat.iteration)) - terminated
            if failed and not is_complete:
                places = {_place(rank, terminated) for rank in failed}
                is_complete = yield from _arrive_for(places, name, count, seat)
        if not is_complete:
            raise self._late(step, state.rank, count)
        return True

    def _late(self, step: str, rank: int, count: int) -> BarrierTimeout:
        return BarrierTimeout(
            f"rank {rank} waited {self._limit:g} s (timeout of FilterGroupedByKey) for the {count} remaining "
            f"ranks, and not all arrived before their groups were {step}; a rank is lost or late",
            rank=rank,
            rendezvous_count=count,
            group_name=self._name,
            limit=self._limit,
        )


def _before(state: State) -> tuple[Seat, StoreLike]:
    """Return a rank's seat before its assignment, and the store of the protocol. Outside a Wrapper both are the state's
    own, and no assignment of another rank is known to have failed."""
    if isinstance(state.store, IterationStore):
        return state.store.seat, state.store.base_store.protocol
    return _present(state), state.store


def _present(state: State) -> Seat:
    return Seat(state.initial_rank, state.rank, state.world_size, state.active_world_size, state.iteration)


def _renumbered(seat: Seat) -> str:
    return f"{seat.iteration}/filter/renumbered"


def _note_number(state: State, seat: Seat) -> Protocol[None]:
    """Note that a rank that comes to a filter has another number than its seat. This must precede its arrivals."""
    if (state.rank, state.world_size) != (seat.rank, seat.world_size):
        yield Set(_renumbered(seat), "1")


def _arrive_for(failed: set[int], name: str, count: int, seat: Seat) -> Protocol[bool]:
    """Arrive for the places of ranks that will not come, if all others have arrived and none has another number than
    its seat: then nobody else can have these places. Return True if this completed the barrier."""
    renumbered = Check((_renumbered(seat),))
    if (yield renumbered) or not (yield from _has_all_but(failed, name, count)) or (yield renumbered):
        return False
    is_complete = False
    for place in sorted(failed):
        is_complete |= yield from restart.arrive(name, place, count)
    return is_complete


def _has_all_but(missing: AbstractSet[int], name: str, count: int) -> Protocol[bool]:
    """Return True if all places of a barrier have been arrived at, except perhaps the missing ones. Asks for the blocks
    of missing places alone: the others are complete if they have arrived a level higher."""
    level = 0
    while count > 1:
        blocks = {place // restart.BLOCK for place in missing}
        for block in sorted(blocks):
            first = block * restart.BLOCK
            others = set(range(first, min(first + restart.BLOCK, count))) - missing
            if others and not (yield Check(tuple(f"{name}/{level}/{place}" for place in sorted(others)))):
                return False
        missing, count, level = blocks, -(-count // restart.BLOCK), level + 1
    return True


def _place(rank: int, terminated: set[int]) -> int:
    """Return how many remaining ranks are below `rank`."""
    return rank - bisect_left(sorted(terminated), rank)


def _seated(
    rule: Callable[[Seat, frozenset[int]], Seat | None], state: State, terminated: set[int]
) -> tuple[State, set[int]]:
    """Move the state to the seat that the rule returns. Raises: RankDiscarded if there is none."""
    following = rule(_present(state), frozenset(terminated))
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


if not TYPE_CHECKING:  # a type checker reports names that are not here

    def __getattr__(name: str) -> object:
        raise missing(__name__, name)
