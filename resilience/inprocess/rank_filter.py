"""Which of the ranks that take part run the function?  The others are spares."""

from __future__ import annotations

from abc import ABC, abstractmethod

from resilience.errors import ConfigurationError
from resilience.inprocess.state import State, Status


class RankFilter(ABC):
    """Lowers active_world_size; ranks from there on wait, initialised, until they are needed."""

    @abstractmethod
    def __call__(self, state: State) -> State:
        """Decide how many ranks are active."""


def _activate(state: State, active: int) -> State:
    state.active_world_size = active
    state.status = Status.ACTIVE if state.rank < active else Status.INACTIVE
    return state


class MaxActiveWorldSize(RankFilter):
    """At most `max_active_world_size` ranks are active; None: as many as there are."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        if max_active_world_size is not None and max_active_world_size < 1:
            raise ConfigurationError(
                f"max_active_world_size is {max_active_world_size}, must be at least 1: nobody would run the function"
            )
        self.max_active_world_size = max_active_world_size

    def __call__(self, state: State) -> State:
        if self.max_active_world_size is None:
            return state
        return _activate(state, min(state.active_world_size, self.max_active_world_size))


class WorldSizeDivisibleBy(RankFilter):
    """The number of active ranks is a multiple of `divisor`."""

    def __init__(self, divisor: int = 1) -> None:
        if divisor < 1:
            raise ConfigurationError(f"divisor is {divisor}, must be at least 1")
        self.divisor = divisor

    def __call__(self, state: State) -> State:
        return _activate(state, state.active_world_size // self.divisor * self.divisor)
