"""What happens on every rank before each start of the function?

`initialize` runs on active and inactive ranks alike, after all ranks have met and RANK and WORLD_SIZE are
set. A job that has restarted often enough also ends here."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any

from resilience.errors import RestartAbort
from resilience.facts import in_words
from resilience.inprocess._runtime import options
from resilience.inprocess.state import State


class Initialize(ABC):
    """Runs before each start. An Exception restarts all ranks; a BaseException such as RestartAbort ends this rank."""

    @abstractmethod
    def __call__(self, state: State) -> State:
        """Prepare an iteration; return the state, changed or not."""


def prepared(hook: Initialize, state: State) -> State:
    """Return the state that `hook` returns. If it returns None, warn the user and return `state`.

    Raises: RestartAbort if it returns anything else, because it would do so after each restart."""
    returned: Any = hook(state)
    if returned is None:
        warnings.warn(
            f"the initialize hook {hook!r} returned None, expected the state; the call continues with the state that "
            "the hook received. Return it",
            UserWarning,
            stacklevel=1,
        )
        return state
    if not isinstance(returned, State):
        raise RestartAbort(f"the initialize hook {hook!r} returned {returned!r}, expected the state: return it")
    return returned


class RetryController(Initialize):
    """Ends the job when the function has been started too often, or when too few ranks are left.

    max_iterations: starts of the function, the first included; None for no bound. An iteration counts even if
    `initialize` or the health check fails before the function starts.
    min_world_size: ranks that must take part, spares included. min_active_world_size: ranks that must run
    the function. All ranks decide alike. Raises: RestartAbort; ConfigurationError."""

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
                f"{in_words.count(state.iteration, 'iteration')} ended with a restart, and max_iterations is "
                f"{self.max_iterations}; the run's report says what interrupted them"
            )
        for role, count, name in (
            ("take part", state.world_size, "min_world_size"),
            ("would run the function", state.active_world_size, "min_active_world_size"),
        ):
            required: int = getattr(self, name)
            if count < required:
                raise RestartAbort(
                    f"only {count} of {in_words.count(state.initial_world_size, 'initial rank')} {role}, and {name} is "
                    f"{required}; the run's report names the lost ranks"
                )
        return state
