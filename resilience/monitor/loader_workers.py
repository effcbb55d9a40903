"""Ends the data loader workers that a dead rank leaves behind.

A worker of torch's DataLoader checks every five seconds whether its rank is alive, and ends if it is not. But before it
ends it waits until its last results have been read. If the rank was killed while the queue was full, nobody reads them:
the worker stays for ever, with its memory and the descriptors of its rank. (Seen with torch 2.13 without this package.)
If the rank dies before a worker has looked for the first time, the worker takes its new parent for its rank, and stays
for ever too. So the monitor kills the workers that outlive the rank by GRACE. It finds them among the children that it
has seen. A young child, or a child of a thread other than the main one, was never seen; the monitor finds it by the
rank's dump, which a forked child has open. With the start method "forkserver" they are children of a child of the rank,
and wait for the end of that one, which lives as long as they do. Other children are left alone: they may be meant to
outlive the rank."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Container, Iterable
from pathlib import Path

from resilience.system import processes
from resilience.system.processes import Process

GRACE = 10.0  # seconds after the end of the rank; twice torch's interval
WORKER = "pt_data_worker"  # what torch calls these processes

Identity = tuple[int, int]  # pid, start time


class LoaderWorkers:
    """The data loader workers of one rank."""

    def __init__(self) -> None:
        self._children: dict[int, int] = {}  # pid -> start time
        self._left: list[Identity] = []
        self._inherited: processes.OpenFile | None = None
        self._rank_began = 0
        self._report: Callable[[tuple[int, ...]], object] = lambda pids: None
        self._thread: threading.Thread | None = None

    def look(self, pid: int) -> None:
        """Remember the present children of the rank, which has this pid. Keeps what it knows if the rank is dead."""
        children = processes.children(pid)
        if children:
            known = self._children
            with contextlib.suppress(OSError):  # too many open files: the next look remembers them
                self._children = {child: known.get(child) or processes.identity_of(child)[1] for child in children}

    def outlived(self, rank: Process, inherited: int | None, report: Callable[[tuple[int, ...]], object]) -> None:
        """The rank is dead: begin to wait for its workers, in a thread.

        inherited: descriptor of a file that the rank's forked children have open. report: called with the pids of those
        that had to be killed, in any thread."""
        self._report = report
        self._rank_began = rank.start_time or 0
        self._left = [identity for identity in self._children.items() if identity[0] != os.getpid()]
        if inherited is not None:
            with contextlib.suppress(OSError):
                self._inherited = processes.OpenFile.of(inherited)
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
        left = {*self._left, *self._heirs()}  # of other kinds too: a young worker has no name yet
        servers = {identity[0] for identity in left if processes.is_alive(identity) and _is_fork_server(identity[0])}
        pids = {pid for pid, _ in left} - servers
        for identity in left | _started_by(servers):
            if not processes.await_end(identity, deadline - time.monotonic()) and _is_orphan(identity, pids):
                processes.kill(identity)
                killed.append(identity[0])
        if killed:
            self._report(tuple(sorted(killed)))

    def _heirs(self) -> list[Identity]:
        """Return the processes that have inherited the rank's file."""
        if self._inherited is None:
            return []
        with contextlib.suppress(OSError):
            heirs = map(processes.identity_of, self._inherited.holders())
            return [heir for heir in heirs if heir[1] >= self._rank_began]  # the launcher has it open too
        return []


def _is_orphan(identity: Identity, others: Container[int]) -> bool:
    """Return True for a worker that has lost its rank. others: a worker of one of these has its own parent."""
    state = processes.state(identity[0])
    if state is None or state.start_time != identity[1] or state.state in "ZX":
        return False
    if processes.name(identity[0]) != WORKER or state.parent in others:
        return False
    siblings = processes.children(state.parent) if _is_fork_server(state.parent) else ()
    return all(processes.name(sibling) == WORKER for sibling in siblings)  # else it may be the worker of another child


def _started_by(servers: Iterable[int]) -> set[Identity]:
    """Return the processes that these fork servers have started and that still run."""
    with contextlib.suppress(OSError):  # too many open files
        return {processes.identity_of(child) for server in servers for child in processes.children(server)}
    return set()


def _is_fork_server(pid: int) -> bool:
    """Return True for a server of the start method "forkserver", and for what it has forked."""
    try:
        return b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
