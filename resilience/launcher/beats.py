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
from collections.abc import Callable
from typing import Any

from resilience.adapters.store import StoreLike, execute
from resilience.core.agent_liveness import LOOKS, Lease, key
from resilience.core.restart import Add
from resilience.errors import StoreError


class Beating:
    """Counts for this agent until stopped, with a client of its own, and watches that its counts get through.

    Two threads: one counts, and stands still with the store; one watches it. Once its lease has run out the agent is
    cut off, for good: every connection to the store is ended, by `cut`."""

    def __init__(
        self, connect: Callable[[], Any], id: str, interval: float, limit: float, cut: Callable[[], object]
    ) -> None:
        """interval: seconds between counts; limit: seconds of silence after which others take this agent for lost.

        Raises: StoreError if the first count does not get through."""
        self._interval = interval
        self._lease = Lease(limit)
        self._cut = cut
        self._key = key(id)
        store = connect()
        execute(Add(self._key, 1), store)
        self._counted = 1
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(store, connect), name="resilience beats", daemon=True),
            threading.Thread(target=self._watch, name="resilience lease", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def lease(self) -> float:
        """Seconds in which a count must get through."""
        return self._lease.seconds

    @property
    def time_left(self) -> float | None:
        """Seconds until others may go on without this agent, None unless it is cut off."""
        return self._lease.time_left(time.monotonic())

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
        self._lease.look(self._counted, time.monotonic())
        while not self._stop.wait(self.lease / LOOKS):
            if self._lease.look(self._counted, time.monotonic()):
                self._cut()  # at each look: somebody may just have been connecting
