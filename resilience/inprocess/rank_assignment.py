"""Who gets which rank once some ranks are gone?"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any

from resilience.adapters.store import drive, execute
from resilience.core import restart
from resilience.errors import ConfigurationTypeError, RankDiscarded
from resilience.inprocess.state import State

Terminated = set[int]


class RankAssignment(ABC):
    """Gets this rank's state and the ranks of the present iteration that do not go on; returns the new
    state and the ranks it has not dealt with. Must agree on all ranks. Raises: RankDiscarded if this
    rank itself gets no place."""

    @abstractmethod
    def __call__(self, state: State, terminated_ranks: Terminated) -> tuple[State, Terminated]:
        """Assign a rank."""


def _check_own(state: State, terminated: Terminated) -> None:
    if state.rank in terminated:
        raise RankDiscarded(f"rank {state.rank} (initially {state.initial_rank}) is terminated", rank=state.rank)


class ShiftRanks(RankAssignment):
    """Ranks move up: each becomes its number less the terminated ranks below it. Keeps the order."""

    def __call__(self, state: State, terminated_ranks: Terminated) -> tuple[State, Terminated]:
        _check_own(state, terminated_ranks)
        state.rank -= sum(1 for rank in terminated_ranks if rank < state.rank)
        state.world_size -= len(terminated_ranks)
        return state, set()


class FillGaps(RankAssignment):
    """The highest ranks take the places of the terminated ones; as few ranks as possible change."""

    def __call__(self, state: State, terminated_ranks: Terminated) -> tuple[State, Terminated]:
        _check_own(state, terminated_ranks)
        size = state.world_size - len(terminated_ranks)
        if state.rank >= size:
            gaps = sorted(rank for rank in terminated_ranks if rank < size)
            movers = sorted(set(range(size, state.world_size)) - terminated_ranks)
            state.rank = gaps[movers.index(state.rank)]
        state.world_size = size
        return state, set()


class FilterGroupedByKey(RankAssignment):
    """Terminates every rank of a group that is no longer whole, such as a node that lost a rank.

    key_or_fn: what a rank belongs to: a value, or a function without arguments or of the state; by
        default the host name. condition: gets the number of ranks left in a group; False terminates
        them all. timeout: for each of its two meetings of all remaining ranks.
    Compose(ShiftRanks(), FilterGroupedByKey(...)) filters first, then assigns. Raises: BarrierTimeout."""

    def __init__(
        self,
        key_or_fn: Hashable | Callable[..., Hashable] = socket.gethostname,
        condition: Callable[[int], bool] = lambda count: count > 0,
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        if not isinstance(timeout, timedelta):
            raise ConfigurationTypeError(
                f"timeout is {timeout!r}, expected a datetime.timedelta; write timeout=timedelta(seconds=60)"
            )
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = timeout

    def __call__(self, state: State, terminated_ranks: Terminated) -> tuple[State, Terminated]:
        _check_own(state, terminated_ranks)
        store = state.store
        key = f"group/{str(self._key(state)).encode().hex()}"
        # Counted once, also if somebody repeats it for a rank that died here: at worst its group, which
        # has lost a member anyway, is counted one short.
        if execute(restart.Add(f"{key}/{state.rank}", 1), store) == 1:
            execute(restart.Add(f"{key}/count", 1), store)
        order = state.rank - sum(1 for rank in terminated_ranks if rank < state.rank)
        remaining = state.world_size - len(terminated_ranks)
        self._meet("counted", order, remaining, store)
        if not self.condition(execute(restart.Add(f"{key}/count", 0), store)):
            slot = execute(restart.Add("filtered/count", 1), store)
            execute(restart.Set(f"filtered/{slot}", str(state.rank)), store)
        self._meet("filtered", order, remaining, store)
        count = execute(restart.Add("filtered/count", 0), store)
        listed = execute(restart.Read(tuple(f"filtered/{slot}" for slot in range(1, count + 1))), store)
        filtered = {int(rank) for rank in listed if rank is not None}
        return state, terminated_ranks | filtered

    def _key(self, state: State) -> Hashable:
        if not callable(self.key_or_fn):
            return self.key_or_fn
        try:
            return self.key_or_fn(state)
        except TypeError:
            return self.key_or_fn()

    def _meet(self, name: str, order: int, count: int, store: Any) -> None:
        drive(restart.barrier(f"group/{name}", order, count, self.timeout.total_seconds()), store)


__all__ = [
    "FillGaps",
    "FilterGroupedByKey",
    "RankAssignment",
    "RankDiscarded",
    "ShiftRanks",
]
