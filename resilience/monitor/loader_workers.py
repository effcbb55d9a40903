"""Ends the data loader workers that a dead rank leaves behind.

A worker of torch's DataLoader checks every five seconds whether its rank is alive, and ends if it is not. But before it
ends it waits until its last results have been read. If the rank was killed while the queue was full, nobody reads them:
the worker stays for ever, with its memory and the descriptors of its rank. (Seen with torch 2.13 without this package.)
So the monitor remembers the children of its rank, and kills those workers that outlive the rank by GRACE. Children of
another kind are left alone: they may be meant to outlive the rank."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from resilience.adapters import processes

GRACE = 10.0  # seconds after the end of the rank; twice torch's interval
WORKER = "pt_data_worker"  # what torch calls these processes

Identity = tuple[int, int]  # pid, start time


class LoaderWorkers:
    """The data loader workers of one rank."""

    def __init__(self) -> None:
        self._children: dict[int, int] = {}  # pid -> start time
        self._left: list[Identity] = []
        self._report: Callable[[tuple[int, ...]], object] = lambda pids: None
        self._thread: threading.Thread | None = None

    def look(self, pid: int) -> None:
        """Remember the present children of the rank, which has this pid. Keeps what it knows if the rank is dead."""
        children = processes.children(pid)
        if children:
            known = self._children
            with contextlib.suppress(OSError):  # too many open files: the next look remembers them
                self._children = {child: known.get(child) or processes.identity_of(child)[1] for child in children}

    def outlived(self, report: Callable[[tuple[int, ...]], object]) -> None:
        """The rank is dead: begin to wait for its workers, in a thread, if there are any. report: called with the pids
        of those that had to be killed, in any thread."""
        self._report = report
        self._left = [identity for identity in self._children.items() if _is_worker(identity)]
        if self._left:
            thread = threading.Thread(target=self._end, args=(GRACE,), name="resilience-loader-workers", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # this host or process has no thread left: `finish` does the work
                return
            self._thread = thread

    @property
    def is_waiting(self) -> bool:
        """Return True if the thread still waits for workers."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self, limit: float) -> None:
        """Wait until they have ended, at most `limit` seconds, and kill the others."""
        if self._thread is None:
            self._end(limit)
            return
        self._thread.join(limit)
        if self._thread.is_alive():
            self._end(0.0)

    def _end(self, limit: float) -> None:
        deadline = time.monotonic() + limit
        killed = []
        for identity in self._left:
            if not processes.await_end(identity, deadline - time.monotonic()) and _is_worker(identity):
                processes.kill(identity)
                killed.append(identity[0])
        if killed:
            self._report(tuple(killed))


def _is_worker(identity: Identity) -> bool:
    return processes.is_alive(identity) and processes.name(identity[0]) == WORKER
