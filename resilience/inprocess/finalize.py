"""What cleans up after an interrupted iteration?

`finalize` runs on every rank after the function has been left and its process groups are gone, before the
health check. It brings the process to a state in which the function can start again: it resets globals and
waits for the function's background work."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from resilience.adapters.call_with_timeout import returns_within
from resilience.errors import ConfigurationTypeError, TimeoutError
from resilience.inprocess import options
from resilience.inprocess.state import State


class Finalize(ABC):
    """Receives the exception that this rank itself raised, or None if another rank failed. Any exception
    that it raises excludes this rank; the other ranks continue."""

    @abstractmethod
    def __call__(self, state: State, exc: Exception | None) -> tuple[State, Exception | None]:
        """Clean up. Return both arguments: a Compose passes them on, the Wrapper ignores them."""


class ThreadedFinalize(Finalize):
    """Runs `fn(*args, **kwargs)` in a thread of its own and waits for it.

    timeout: longest wait; after it the thread is left behind and this rank is excluded.
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
                f"{self._limit:g} s (timeout); this rank is excluded. Raise the timeout, or make the function faster",
                limit=self.timeout,
            )
        return state, exc
