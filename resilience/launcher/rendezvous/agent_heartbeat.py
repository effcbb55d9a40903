"""Which agents are still alive?  Each one increments a counter in the job's store; others time the changes.

An agent that is killed, stopped or cut off stops counting. No code compares clocks of two hosts. A gap in which this
process or the store stood still counts little, because silence is summed up over several checks.

A lost agent may still run behind a failed network. So an agent whose counts do not reach the store considers itself
lost before the others may, and stops using the store. If a job is split in two, only the part that has the store
continues."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from resilience.core.agent_liveness import COUNTS, LOOKS, STOP_LIMIT, Lease, key
from resilience.core.restart import Add
from resilience.errors import LaunchError, StoreError
from resilience.system.store import StoreLike, execute

LOOK = 1.0  # seconds between two looks at most


class AgentHeartbeat:
    """Counts for this agent until stopped, with its own client, and checks that the counts reach the store.

    Two threads: one counts, and blocks if the store blocks; the other watches it. When the lease has expired, the agent
    is cut off for good: `cut` closes every connection to the store."""

    def __init__(
        self,
        connect: Callable[[], Any],
        id: str,
        interval: float,
        limit: float,
        cut: Callable[[], object],
        is_asked_to_stop: Callable[[], bool] = lambda: False,
        look_after_store: Callable[[], object] = lambda: None,
    ) -> None:
        """Count once. interval: seconds between counts; limit: seconds of silence after which others consider this
        agent lost; is_asked_to_stop: True shortens the lease to `STOP_LIMIT`; look_after_store: called at least once a
        second. Both are called in a thread.

        Raises: StoreError if the first count does not reach the store."""
        self._interval = interval
        self._lease = Lease(limit)
        self._cut = cut
        self._is_asked_to_stop = is_asked_to_stop
        self._look_after_store = look_after_store
        self._key = key(id)
        store = connect()
        execute(Add(self._key, 1), store)
        self._counted = 1
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(store, connect), name="resilience heartbeat", daemon=True),
            threading.Thread(target=self._watch, name="resilience lease", daemon=True),
        ]

    def start(self) -> None:
        """Count until stopped. Raises: LaunchError."""
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self._stop.set()
            raise LaunchError(
                f"this agent's heartbeat could not be started: {error}; this host lacks the resources for it"
            ) from error

    @property
    def lease(self) -> float:
        """Return the seconds within which a count must reach the store."""
        return self._lease.seconds

    @property
    def is_shortened(self) -> bool:
        """Return True if the lease is shorter because this agent was asked to stop."""
        return self._lease.is_shortened

    @property
    def time_left(self) -> float | None:
        """Return the seconds until others may continue without this agent; None unless it is cut off."""
        return self._lease.time_left(time.monotonic())

    def stop(self) -> None:
        """Stop counting."""
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(2 * self._interval)

    def _run(self, store: StoreLike, connect: Callable[[], Any]) -> None:
        while not self._stop.wait(self._interval):
            try:
                execute(Add(self._key, 1), store)
                self._counted += 1
            except StoreError:  # if the store is gone, every thread that waits for it notices that itself
                if self._lease.has_run_out:
                    return
                with contextlib.suppress(StoreError, OSError):
                    store = connect()

    def _watch(self) -> None:
        self._lease.look(self._counted, time.monotonic())
        while not self._stop.wait(min(self.lease / LOOKS, LOOK)):
            with contextlib.suppress(OSError):  # this thread must go on
                self._look_after_store()
            if self._is_asked_to_stop():
                self._lease.shorten(max(STOP_LIMIT, COUNTS * self._interval))
            if self._lease.look(self._counted, time.monotonic()):
                with contextlib.suppress(OSError):  # no descriptor is left; the next check tries again
                    self._cut()  # at each check, because a thread may just have connected
