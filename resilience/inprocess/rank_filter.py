"""How many of the ranks that take part run the function?  The others are spares.

A filter only lowers `active_world_size`. The ranks 0 to active_world_size-1 run the function; the other ranks
are initialised, wait, and step in when a restart needs them. The filter runs after the rank assignment, on every
rank, and must decide alike on all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from resilience.inprocess._runtime import options
from resilience.inprocess.later_releases import missing
from resilience.inprocess.state import State, Status


class RankFilter(ABC):
    """Chooses how many ranks are active. Before the first filter runs, all ranks are active."""

    @abstractmethod
    def __call__(self, state: State) -> State:
        """Return the state with active_world_size, and this rank's status, set."""


class MaxActiveWorldSize(RankFilter):
    """Limits the number of active ranks to `max_active_world_size`; None: no limit.

    Raises: ConfigurationError."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        limit = max_active_world_size
        self.max_active_world_size = None if limit is None else options.whole("max_active_world_size", limit, 1)

    def __call__(self, state: State) -> State:
        limit = self.max_active_world_size
        return _activate(state, state.active_world_size if limit is None else min(state.active_world_size, limit))


class WorldSizeDivisibleBy(RankFilter):
    """Sets the number of active ranks to the largest multiple of `divisor`. With fewer ranks than `divisor` this is 0,
    and RetryController's min_active_world_size then ends the job.

    Raises: ConfigurationError."""

    def __init__(self, divisor: int = 1) -> None:
        self.divisor = options.whole("divisor", divisor, 1)

    def __call__(self, state: State) -> State:
        return _activate(state, state.active_world_size // self.divisor * self.divisor)


def _activate(state: State, count: int) -> State:
    state.active_world_size = count
    state.status = Status.ACTIVE if state.rank < count else Status.INACTIVE
    return state


if not TYPE_CHECKING:  # a type checker reports names that are not here

    def __getattr__(name: str) -> object:
        raise missing(__name__, name)
