"""How does a loop of descriptors do something a little later?  Its selector also returns calls that are due.

The loop calls the `data` of each key, as it does for a descriptor."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable


class TimedSelector(selectors.DefaultSelector):
    """A selector that also returns calls at their time. The key of such a call has the call as its data."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[float, Callable[[], None]]] = []

    def call_in(self, seconds: float, call: Callable[[], None]) -> None:
        """Have the loop call this once, after so many seconds."""
        self._calls.append((time.monotonic() + seconds, call))

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the keys that are ready, and those of calls that are due. It may return earlier than `timeout`, with
        none of them."""
        if self._calls:
            wait = max(0.0, min(at for at, _ in self._calls) - time.monotonic())
            timeout = wait if timeout is None else min(timeout, wait)
        ready = super().select(timeout)
        now = time.monotonic()
        due = [call for at, call in self._calls if at <= now]
        self._calls = [(at, call) for at, call in self._calls if at > now]
        return [*ready, *((selectors.SelectorKey(-1, -1, 0, call), 0) for call in due)]
