"""What happens on every rank before each start of the function."""

from __future__ import annotations

from abc import ABC, abstractmethod

from resilience.errors import RestartAbort
from resilience.inprocess.state import State


class Initialize(ABC):
    """An Exception restarts all ranks; a BaseException ends this rank."""

    @abstractmethod
    def __call__(self, state: State) -> State:
        """Prepare an iteration."""


class RetryController(Initialize):
    """Ends the job when it has restarted too often, or too few ranks are left.

    max_iterations: starts of the function, the first included; None for no bound.
    min_world_size, min_active_world_size: fewer ranks end the job. Raises: RestartAbort."""

    def __init__(
        self,
        max_iterations: int | None = None,
        min_world_size: int = 1,
        min_active_world_size: int = 1,
    ) -> None:
        self.max_iterations = max_iterations
        self.min_world_size = min_world_size
        self.min_active_world_size = min_active_world_size

    def __call__(self, state: State) -> State:
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            raise RestartAbort(
                f"the function was started {state.iteration} times and max_iterations is "
                f"{self.max_iterations}; see the run's report for why it kept failing"
            )
        for name, have, need in (
            ("world size", state.world_size, self.min_world_size),
            ("active world size", state.active_world_size, self.min_active_world_size),
        ):
            if have < need:
                raise RestartAbort(f"the {name} is {have} and must be at least {need}; too many ranks were lost")
        return state
