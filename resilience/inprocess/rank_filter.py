"""Which of the ranks that take part run the function?  The others are spares.

A filter only lowers `active_world_size`: the ranks 0 to active_world_size-1 run the function, the others
wait, initialised, and step in when a restart needs them. It runs after the rank assignment, on every rank,
and must come to the same answer on all."""

from __future__ import annotations

from abc import ABC, abstractmethod

from resilience.inprocess import options
from resilience.inprocess.state import State, Status


class RankFilter(ABC):
    """Chooses how many ranks are active. All are, before the first filter runs."""

    @abstractmethod
    def __call__(self, state: State) -> State:
        """Return the state with active_world_size, and this rank's status, set."""


class MaxActiveWorldSize(RankFilter):
    """At most `max_active_world_size` ranks are active; None: all of them.

    Raises: ConfigurationError."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        most = max_active_world_size
        self.max_active_world_size = None if most is None else options.whole("max_active_world_size", most, 1)

    def __call__(self, state: State) -> State:
        most = self.max_active_world_size
        return _activate(state, state.active_world_size if most is None else min(state.active_world_size, most))


class WorldSizeDivisibleBy(RankFilter):
    """The number of active ranks is the largest multiple of `divisor`; 0 if there are fewer ranks than that,
    which RetryController's min_active_world_size turns into the end of the job.

    Raises: ConfigurationError."""

    def __init__(self, divisor: int = 1) -> None:
        self.divisor = options.whole("divisor", divisor, 1)

    def __call__(self, state: State) -> State:
        return _activate(state, state.active_world_size // self.divisor * self.divisor)


def _activate(state: State, count: int) -> State:
    state.active_world_size = count
    state.status = Status.ACTIVE if state.rank < count else Status.INACTIVE
    return state
