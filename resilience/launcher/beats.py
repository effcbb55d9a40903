"""Which agents are still there?  Each counts in the job's store; others time the changes by their own clock.

An agent that is killed, stopped or cut off stops counting. Nobody compares clocks of two hosts, and a gap
in which we ourselves, or the store, stood still counts for little: silence is summed up over looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from resilience.adapters.store import StoreLike, execute
from resilience.core.restart import Add
from resilience.errors import StoreError


def key(id: str) -> str:
    """Return where an agent counts."""
    return f"beat/{id}"


class Beating:
    """Counts for this agent, in a thread and with a client of its own, until stopped."""

    def __init__(self, connect: Callable[[], Any], id: str, interval: float) -> None:
        self._interval = interval
        self._key = key(id)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(connect,), name="resilience beats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop counting."""
        self._stop.set()
        self._thread.join(2 * self._interval)

    def _run(self, connect: Callable[[], Any]) -> None:
        try:
            store: StoreLike = connect()
            while True:
                execute(Add(self._key, 1), store)
                if self._stop.wait(self._interval):
                    return
        except StoreError:
            return  # whoever waits for anything in the store notices by itself


class Silences:
    """Times the silence of others. interval: seconds between looks; limit: of silence, seconds."""

    def __init__(self, interval: float, limit: float) -> None:
        self.limit = limit
        self._interval = interval
        self._seen: dict[str, tuple[int, float]] = {}  # id -> count, silent for
        self._looked_at: dict[str, float] = {}

    def lost(self, store: StoreLike, ids: Iterable[str]) -> list[str]:
        """Look at these agents, unless that was done a moment ago; answers which of them are lost.

        Raises: StoreError."""
        return [id for id in ids if self._silent_for(store, id) >= self.limit]

    def _silent_for(self, store: StoreLike, id: str) -> float:
        now = time.monotonic()
        since = now - self._looked_at.get(id, float("-inf"))
        count, silent_for = self._seen.get(id, (-1, 0.0))
        if since < self._interval:
            return silent_for
        self._looked_at[id] = now
        current = execute(Add(key(id), 0), store)
        silent_for = silent_for + min(since, 2 * self._interval) if current == count else 0.0
        self._seen[id] = current, silent_for
        return silent_for


class Timer:
    """Has a condition held for long enough?"""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._since: float | None = None

    def has_run_out(self, is_running: bool) -> bool:
        """Answer whether the condition has held at every look for `limit` seconds."""
        if not is_running:
            self._since = None
            return False
        if self._since is None:
            self._since = time.monotonic()
        return time.monotonic() - self._since >= self._limit
