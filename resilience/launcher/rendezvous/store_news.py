"""What happened to this node's store process?  It is continued if it was stopped, and its end is noted.

The heartbeat's thread looks whether it is stopped, because the main thread may wait for it. The main thread looks
whether it has ended, because it is the one that replaces it."""

from __future__ import annotations

import queue

from resilience.facts import events
from resilience.launcher.rendezvous.stores import StoreProcess
from resilience.system.processes import continue_if_stopped

StoreProcessNews = events.StoreProcessStopped | events.StoreProcessLost


class StoreNews:
    """The events of a node's store processes, until they are taken."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[StoreProcessNews] = queue.SimpleQueue()
        self._lost_pid = 0  # the last process whose loss was noted

    def resume(self, stores: StoreProcess) -> None:
        """Continue the process if it was stopped: every client would wait for it. Any thread."""
        pid = stores.pid
        if continue_if_stopped(pid):
            self._events.put(events.StoreProcessStopped(pid))

    def note_loss(self, stores: StoreProcess, is_job_store: bool, is_cycle_store: bool) -> bool:
        """Return True if the process has ended and that was not noted before; note it. Main thread."""
        if stores.is_alive or stores.pid == self._lost_pid:
            return False
        self._lost_pid = stores.pid
        self._events.put(events.StoreProcessLost(stores.pid, stores.end, is_job_store, is_cycle_store))
        return True

    def take(self) -> list[StoreProcessNews]:
        """Return the events since the last call. Main thread."""
        return [self._events.get() for _ in range(self._events.qsize())]
