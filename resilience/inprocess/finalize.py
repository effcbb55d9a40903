"""What cleans up after an interrupted iteration."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from resilience.errors import TimeoutError
from resilience.inprocess.state import State


class Finalize(ABC):
    """Called with the exception this rank itself raised, or None. Raising excludes this rank."""

    @abstractmethod
    def __call__(self, state: State, exc: Exception | None) -> tuple[State, Exception | None]:
        """Bring the process back to where the function may start again."""


class ThreadedFinalize(Finalize):
    """Runs `fn(*args, **kwargs)` in a thread and gives it `timeout`. Raises: TimeoutError, or what it raised."""

    def __init__(
        self,
        timeout: timedelta,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.timeout = timeout
        self.fn = fn
        self.args = tuple(args)
        self.kwargs = dict(kwargs or {})

    def __call__(self, state: State, exc: Exception | None) -> tuple[State, Exception | None]:
        raised: list[BaseException] = []

        def work() -> None:
            try:
                self.fn(*self.args, **self.kwargs)
            except BaseException as error:  # handed over to the caller's thread
                raised.append(error)

        thread = threading.Thread(target=work, name="resilience-finalize", daemon=True)
        thread.start()
        thread.join(self.timeout.total_seconds())
        if thread.is_alive():
            raise TimeoutError(
                f"finalize function {getattr(self.fn, '__qualname__', self.fn)!r} did not return within "
                f"{self.timeout.total_seconds():g} s; raise its timeout or make it shorter",
                limit=self.timeout,
            )
        if raised:
            raise raised[0]
        return state, exc
