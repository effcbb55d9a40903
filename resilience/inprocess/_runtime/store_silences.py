"""For how long did the store not answer?  A rank may wait for it in C++ where nothing shows that it does.

`init_process_group` waits so, with a client of its own. The monitor of a rank that shows no life in its function asks
the store a question. While that has no answer, the rank's silence is no hang: `core.standstills` subtracts the time.
If the host stays away, only the limit of a wait for the store, barrier_timeout, is subtracted."""

from __future__ import annotations

import time
from collections.abc import Callable

from resilience.core.standstills import NOTICEABLE, Standstill, longest


class StoreSilences:
    """Asks the store on the thread that owns the monitor's client, one question at a time."""

    def __init__(self, perform: Callable[[Callable[[], None]], object], ask: Callable[[], object]) -> None:
        """perform: lets that thread call a function soon. ask: returns with the store's answer; raises if it is
        lost."""
        self._perform = perform
        self._ask = ask
        self._limit = 0.0  # seconds of one silence that count
        self._asked_at: float | None = None
        self._is_open = False
        self._ended: list[Standstill] = []

    def open(self, limit: float) -> None:
        """Note that the store can be asked from now on: that thread is connected to it. Call it before its first
        operation in the call, which may have no answer either. limit: seconds of one silence that count."""
        self._limit = limit
        self._is_open = True

    def ask(self) -> None:
        """Ask, unless a question is open. Returns at once."""
        if self._asked_at is None and self._is_open:
            self._asked_at = time.monotonic()
            self._perform(self._await_answer)

    def all(self) -> list[Standstill]:
        """Return the silences so far, also the present one."""
        asked_at = self._asked_at
        return self._ended if asked_at is None else self._with(asked_at)

    def _await_answer(self) -> None:
        try:
            self._ask()
        except Exception:
            self._is_open = False  # a lost store answers no later question either
            raise
        finally:
            self._end()

    def _end(self) -> None:
        if self._asked_at is not None:
            self._ended = self._with(self._asked_at)
            self._asked_at = None

    def _with(self, asked_at: float) -> list[Standstill]:
        now = time.monotonic()
        if now - asked_at <= NOTICEABLE:
            return self._ended
        return longest([*self._ended, Standstill(asked_at, min(now, asked_at + self._limit))])
