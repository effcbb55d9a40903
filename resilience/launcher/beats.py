"""Which agents are still there?  Each counts in the job's store; others time the changes by their own clock.

An agent that is killed, stopped or cut off stops counting. Nobody compares clocks of two hosts, and a gap
in which we ourselves, or the store, stood still counts for little: silence is summed up over looks.

Who is lost may still be there, behind a network that has failed. So an agent whose counts do not get through
takes itself for lost before the others may, and ends whatever it does with the store: of two parts of a job
only the one that has the store goes on."""

from __future__ import annotations

import contextlib
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


LEASE = 0.75  # of the silence after which others take an agent for lost: what is left is for its workers to end in
LOOKS = 20  # within a lease


class Beating:
    """Counts for this agent until stopped, with a client of its own, and watches that its counts get through.

    Two threads: one counts, and stands still with the store; one watches it. Once no count got through for LEASE
    of `limit` seconds the agent is cut off, for good: every connection to the store is ended, by `cut`."""

    def __init__(
        self, connect: Callable[[], Any], id: str, interval: float, limit: float, cut: Callable[[], object]
    ) -> None:
        """interval: seconds between counts; limit: seconds of silence after which others take this agent for lost.

        Raises: StoreError if the first count does not get through."""
        self._interval = interval
        self._limit = limit
        self._cut = cut
        self._key = key(id)
        store = connect()
        execute(Add(self._key, 1), store)
        self._counted = 1
        self._stop = threading.Event()
        self._cut_off_at: float | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(store, connect), name="resilience beats", daemon=True),
            threading.Thread(target=self._watch, name="resilience lease", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def lease(self) -> float:
        """Seconds in which a count must get through."""
        return LEASE * self._limit

    @property
    def time_left(self) -> float | None:
        """Seconds until others may go on without this agent, None unless it is cut off."""
        if self._cut_off_at is None:
            return None
        return max(0.0, self._cut_off_at + self._limit - self.lease - time.monotonic())

    def stop(self) -> None:
        """Stop counting."""
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * self._interval)

    def _run(self, store: StoreLike, connect: Callable[[], Any]) -> None:
        while not self._stop.wait(self._interval):
            try:
                execute(Add(self._key, 1), store)
                self._counted += 1
            except StoreError:  # if the store is gone, whoever waits for anything in it notices by himself
                with contextlib.suppress(StoreError):
                    store = connect()

    def _watch(self) -> None:
        """Add up for how long no count has got through; time in which this process stood still counts for little,
        for afterwards the store tells what happened meanwhile."""
        pause = self.lease / LOOKS
        counted, silent_for, looked_at = self._counted, 0.0, time.monotonic()
        while not self._stop.wait(pause):
            now = time.monotonic()
            silent_for = silent_for + min(now - looked_at, 2 * pause) if counted == self._counted else 0.0
            counted, looked_at = self._counted, now
            if silent_for >= self.lease and self._cut_off_at is None:
                self._cut_off_at = now
            if self._cut_off_at is not None:
                self._cut()  # at each look: somebody may just have been connecting


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
        if time.monotonic() - self._looked_at.get(id, float("-inf")) < self._interval:
            return self._seen[id][1]
        return self.hear(id, execute(Add(key(id), 0), store))

    def hear(self, id: str, current: int) -> float:
        """Take an agent's count as it is now; answers for how many seconds it has been silent."""
        now = time.monotonic()
        since = now - self._looked_at.get(id, float("-inf"))
        count, silent_for = self._seen.get(id, (-1, 0.0))
        self._looked_at[id] = now
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
