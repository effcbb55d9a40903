"""What happens on every rank before each start of the function?

`initialize` runs on active and inactive ranks alike, after all of them have met and RANK and WORLD_SIZE
are set. It is also where a job says that it has restarted often enough."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod

from resilience.errors import RestartAbort
from resilience.inprocess import options
from resilience.inprocess.state import State


class Initialize(ABC):
    """An Exception restarts all ranks; a BaseException, such as RestartAbort, ends this rank."""

    @abstractmethod
    def __call__(self, state: State) -> State:
        """Prepare an iteration; return the state, changed or not."""


def prepared(hook: Initialize, state: State) -> State:
    """Return the state that `hook` returns. A hook without a return keeps the state, and its user is warned."""
    returned: State | None = hook(state)
    if returned is None:
        warnings.warn(
            f"the initialize hook {hook!r} returned None, expected the state; the call goes on with the state that the "
            "hook was given. Return it",
            UserWarning,
            stacklevel=1,
        )
    return state if returned is None else returned


class RetryController(Initialize):
    """Ends the job when it has been started too often, or when too few ranks are left.

    max_iterations: starts of the function, the first included; None for no bound.
    min_world_size: ranks that must take part, spares included. min_active_world_size: ranks that must run
    the function. All ranks come to the same answer. Raises: RestartAbort; ConfigurationError."""

    def __init__(
        self,
        max_iterations: int | None = None,
        min_world_size: int = 1,
        min_active_world_size: int = 1,
    ) -> None:
        self.max_iterations = None if max_iterations is None else options.whole("max_iterations", max_iterations, 1)
        self.min_world_size = options.whole("min_world_size", min_world_size, 0)
        self.min_active_world_size = options.whole("min_active_world_size", min_active_world_size, 0)

    def __call__(self, state: State) -> State:
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            raise RestartAbort(
                f"the function was started {state.iteration} times and max_iterations is {self.max_iterations}; "
                "the run's report says why it was interrupted"
            )
        for what, have, name in (
            ("take part", state.world_size, "min_world_size"),
            ("would run the function", state.active_world_size, "min_active_world_size"),
        ):
            need: int = getattr(self, name)
            if have < need:
                raise RestartAbort(
                    f"{have} of initially {state.initial_world_size} ranks {what} and {name} is {need}; the run's "
                    "report says which ranks were lost"
                )
        return state
