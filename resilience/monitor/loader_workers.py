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

from resilience.adapters import processes

GRACE = 10.0  # seconds after the end of the rank; twice torch's interval
WORKER = "pt_data_worker"  # what torch calls these processes


class LoaderWorkers:
    """The data loader workers of one rank."""

    def __init__(self) -> None:
        self._children: dict[int, int] = {}  # pid -> start time
        self._left: list[tuple[int, int]] = []  # workers for which no thread could be started
        self._ended: list[int] = []
        self._thread: threading.Thread | None = None

    def look(self, pid: int) -> None:
        """Remember the present children of the rank, which has this pid. Keeps what it knows if the rank is dead."""
        children = processes.children(pid)
        if children:
            known = self._children
            with contextlib.suppress(OSError):  # too many open files: the next look remembers them
                self._children = {child: known.get(child) or processes.identity_of(child)[1] for child in children}

    def outlived(self) -> None:
        """The rank is dead: begin to wait for its workers, in a thread, if there are any."""
        left = [identity for identity in self._children.items() if _is_worker(identity)]
        if left and self._thread is None:
            thread = threading.Thread(target=self._end, args=(left,), name="resilience-loader-workers", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # this host or process has no thread left: `finish` does the work
                self._left = left
            else:
                self._thread = thread

    def finish(self) -> tuple[int, ...]:
        """Wait until they have ended; return the pids of those that had to be killed."""
        self._end(self._left)
        if self._thread is not None:
            self._thread.join(GRACE + 1.0)
        return tuple(self._ended)

    def _end(self, left: list[tuple[int, int]]) -> None:
        deadline = time.monotonic() + GRACE
        for identity in left:
            if not processes.await_end(identity, deadline - time.monotonic()) and _is_worker(identity):
                processes.kill(identity)
                self._ended.append(identity[0])


def _is_worker(identity: tuple[int, int]) -> bool:
    return processes.is_alive(identity) and processes.name(identity[0]) == WORKER
