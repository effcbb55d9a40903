"""What cleans up after an interrupted iteration?

`finalize` runs on every rank once its function has been left and its process groups are gone, before the
health check. It brings the process to where the function may start again: globals reset, background work
of the function awaited."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from resilience.adapters.limited import returns_within
from resilience.errors import ConfigurationTypeError, TimeoutError
from resilience.inprocess import options
from resilience.inprocess.state import State


class Finalize(ABC):
    """Called with the exception this rank itself raised, or None where another rank failed. Whatever it
    raises excludes this rank; the others go on."""

    @abstractmethod
    def __call__(self, state: State, exc: Exception | None) -> tuple[State, Exception | None]:
        """Clean up; return both arguments, which a Compose hands on. The Wrapper ignores what is returned."""


class ThreadedFinalize(Finalize):
    """Runs `fn(*args, **kwargs)` in a thread of its own and waits for it.

    timeout: how long; after that the thread is left behind and this rank is excluded.
    Raises: TimeoutError, or what `fn` raised; ConfigurationError."""

    def __init__(
        self,
        timeout: timedelta,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(fn):
            raise ConfigurationTypeError(f"fn is {fn!r}, expected a function", option="fn", value=fn)
        self._limit = options.seconds("timeout", timeout)
        self.timeout = timeout
        self.fn = fn
        self.args = tuple(args or ())
        self.kwargs = dict(kwargs or {})

    def __call__(self, state: State, exc: Exception | None = None) -> tuple[State, Exception | None]:
        work = functools.partial(self.fn, *self.args, **self.kwargs)
        if not returns_within(self._limit, work, f"resilience-finalize-{state.rank}"):
            raise TimeoutError(
                f"finalize function {getattr(self.fn, '__qualname__', self.fn)!r} did not return within "
                f"{self._limit:g} s (timeout); this rank is excluded. Raise its timeout, or make it shorter",
                limit=self.timeout,
            )
        return state, exc
