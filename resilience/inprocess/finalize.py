"""What cleans up after an interrupted iteration?

`finalize` runs on every rank after the function has been left and its process groups are gone, before the
health check. It brings the process to a state in which the function can start again: it resets globals and
waits for the function's background work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from resilience.errors import ConfigurationTypeError, TimeoutError, error_in_words
from resilience.inprocess._runtime import options
from resilience.inprocess.state import State
from resilience.system.call_with_timeout import returns_within


class Finalize(ABC):
    """Receives the exception that this rank itself raised, or None if another rank failed. Any exception
    that it raises excludes this rank; the other ranks continue."""

    @abstractmethod
    def __call__(self, state: State, exc: Exception | None) -> tuple[State, Exception | None]:
        """Clean up. Return both arguments: a Compose passes them on, the Wrapper ignores them."""


class ThreadedFinalize(Finalize):
    """Runs `fn(*args, **kwargs)` in a thread of its own and waits for it.

    timeout: longest wait; after it the thread is left behind and this rank is excluded. An exception of `fn` is
    recorded (`hook.failed`) and logged with its traceback; the restart continues.
    Raises: TimeoutError; ConfigurationError."""

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
        name = getattr(self.fn, "__qualname__", repr(self.fn))
        raised: list[BaseException] = []

        def work() -> None:
            try:
                self.fn(*self.args, **self.kwargs)
            except BaseException as error:  # as in any thread, it ends only this thread
                raised.append(error)

        is_in_time = returns_within(self._limit, work, f"resilience-finalize-{state.rank}")
        if not is_in_time:
            raise TimeoutError(
                f"finalize function {name!r} did not return within {self._limit:g} s (timeout); this rank is "
                "excluded. Raise the timeout, or make the function faster",
                limit=self.timeout,
            )
        if raised:
            _note(state, name, raised.pop())
        return state, exc


def _note(state: State, name: str, error: BaseException) -> None:
    """Record and log an exception that ended the thread of a function."""
    from resilience.facts import events  # a call has loaded them
    from resilience.inprocess.hook_store import IterationStore
    from resilience.telemetry import standard

    if isinstance(state.store, IterationStore):
        message = error_in_words(error, 400)
        state.store.base_store.emit(events.HookFailed("finalize", f"{message} (in {name}; the restart continues)"))
    standard.finalize_failed(name, error)
