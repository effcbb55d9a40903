"""Does work that a disk may block, in a thread of its own.

A file server that does not answer blocks readers and writers for as long as it likes; no timeout and no signal ends
that. So rank, monitor and agent give such work to the one thread of a `Writer`. Its queue is bounded: if it is full,
the job is refused and the caller counts it. After a fork the child has its own writer."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from resilience.system import files

THREAD = "resilience-writes"
MOST = 4096  # jobs that wait for the disk
ASK_LIMIT = 5.0  # seconds for a folder to prove that it is usable
STALL = 1.0  # seconds for one job, after which the disk counts as one that does not answer
LAST_LIMIT = 10.0  # seconds for a slow disk to take the last lines
LAST_STALL = 5.0  # seconds for one job then: waiting longer than STALL holds up nobody, and lost lines stay lost
LOOK = 0.05  # seconds between two checks that the disk still answers
READ_LIMIT = 2.0  # seconds for a read: longer than STALL, so only a disk that hangs exceeds it
NO_ANSWER = "the disk does not answer"

T = TypeVar("T")
_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


class Writer:
    """The thread and its queue. Safe to use from any thread; starts with the first job."""

    def __init__(self) -> None:
        self._forget()
        _writers.add(self)

    def _forget(self) -> None:
        """Reset. In a forked child the thread, its locks and its jobs belong to the parent."""
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt the thread that holds it
        self._renew()

    def _renew(self) -> None:
        # Implemented in C, so that an exception that interrupts the caller leaves no lock behind.
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._job_began_at: float | None = None  # when the present job began

    @property
    def is_stalled(self) -> bool:
        """Return True if the disk does not answer."""
        return self._has_stalled_for(STALL)

    def _has_stalled_for(self, seconds: float) -> bool:
        since = self._job_began_at
        return since is not None and time.monotonic() - since > seconds

    def submit(self, job: Callable[[], object], is_last: bool = False) -> bool:
        """Run the job after all earlier ones. Return False if the queue is full, or if no thread can be started now.
        The job must not raise. is_last: the end of a file's jobs, which a full queue takes too."""
        if self._pid != os.getpid():  # a hook of the program in a forked child that runs before ours
            self._forget()
        with self._lock:  # against `leave`: nobody would do a job that comes after its last one
            if (self._jobs.qsize() >= MOST and not is_last) or not self._is_started():
                return False
            self._jobs.put(job)
        return True

    def _is_started(self) -> bool:
        """Start the thread unless there is one. Return False if it cannot be started."""
        if self._thread is not None:
            return True
        thread = threading.Thread(target=self._work, args=(self._jobs,), name=THREAD, daemon=True)
        if self._thread is not None:
            return True  # type: ignore[unreachable]  # a signal handler has started one meanwhile
        self._thread = thread
        try:
            thread.start()
        except BaseException as error:
            # If it has started all the same, it does what is in its queue, and ends. A later job starts another one.
            self._jobs.put(None)
            self._renew()
            if isinstance(error, RuntimeError):  # this host or process has no thread left
                return False
            raise  # of a signal handler
        return True

    def end(self, limit: float = LAST_LIMIT) -> None:
        """Finish all jobs, for at most `limit` seconds, and end the thread. A later job starts another one."""
        thread = self._thread
        if thread is not None:
            is_done = self.flush(limit)
            self.leave()
            if is_done:
                thread.join(limit)

    def ask(self, function: Callable[[], T], limit: float, is_last: bool = False) -> T:
        """Run `function`, wait for it, and return its result. is_last: as for `submit`.

        Raises: what it raises; OSError if it takes more than `limit` seconds, or the disk already does not answer."""
        results: list[T] = []
        errors: list[BaseException] = []
        is_done = threading.Event()

        def job() -> None:
            try:
                results.append(function())
            except BaseException as raised:  # re-raised in the caller
                errors.append(raised)
            self._tell(is_done)

        if self.is_stalled or not self.submit(job, is_last) or not is_done.wait(limit):
            raise OSError(errno.ETIMEDOUT, NO_ANSWER)
        if errors:
            raise errors[0]
        return results[0]

    def leave(self) -> None:
        """End the thread once all jobs are done. A later job starts another one. Does not wait."""
        with self._lock:
            self._jobs.put(None)
            self._renew()

    def flush(self, limit: float = LAST_LIMIT) -> bool:
        """Wait until all jobs are done, as long as the disk answers, at most `limit` seconds. Return True if they
        are."""
        if self._thread is None:
            return True
        is_done = threading.Event()
        deadline = time.monotonic() + limit
        if self._has_stalled_for(LAST_STALL) or not self.submit(lambda: self._tell(is_done), is_last=True):
            return False
        while not is_done.wait(min(LOOK, max(0.0, deadline - time.monotonic()))):
            if self._has_stalled_for(LAST_STALL) or time.monotonic() >= deadline:
                return is_done.is_set()
        return True

    def replace(self, path: Path, content: bytes) -> bool:
        """Write a whole file, later. Return False if it is refused, as when the disk does not answer: newer content
        comes soon."""
        return not self.is_stalled and self.submit(lambda: files.replace(path, content))

    def _tell(self, is_done: threading.Event) -> None:
        """Tell the caller that its job is done, as the last thing the job does."""
        self._job_began_at = None  # first: the caller may look at once, long before this thread runs again
        is_done.set()

    def _work(self, jobs: queue.SimpleQueue[Callable[[], object] | None]) -> None:
        while (job := jobs.get()) is not None:
            self._job_began_at = time.monotonic()
            with contextlib.suppress(Exception):  # the thread's edge: a job that raises must not stop the others
                job()
            self._job_began_at = None


def asked(function: Callable[[], T], limit: float = ASK_LIMIT) -> T:
    """Run `function` in a thread of its own, wait for it, and return its result. For a folder that may prove unusable
    and is then given up. Raises: what the function raises, OSError if it takes longer than `limit` seconds."""
    writer = Writer()
    try:
        return writer.ask(function, limit)
    finally:
        writer.leave()


class BackgroundFile:
    """A file of lines, written by the writer's thread."""

    def __init__(self, path: Path) -> None:
        self._file = files.LineFile(path)
        self._lost = 0  # accepted lines that could not be written
        self._lost_before = 0  # at the last `take_lost`

    def write(self, line: bytes, lost: Callable[[], object] = lambda: None, losses: int = 1) -> bool:
        """Append a line (newline included), later; return False if it is refused. lost: called in the writer's thread
        if it is accepted, but cannot be written. losses: how many losses that is."""
        return WRITER.submit(lambda: self._append(line, lost, losses))

    def write_now(self, line: bytes, limit: float) -> bool:
        """Append a line and wait for that, at most `limit` seconds. Return True if it is written, or will be when the
        disk answers again."""
        if WRITER.is_stalled:
            return self.write(line)
        is_done = threading.Event()
        is_written = True

        def job() -> None:
            nonlocal is_written
            is_written = self._file.write(line)
            is_done.set()

        return WRITER.submit(job) and (not is_done.wait(limit) or is_written)

    def take_lost(self) -> int:
        """Return how many losses there were since the last call: accepted lines that could not be written."""
        total = self._lost  # the writer's thread goes on counting
        lost, self._lost_before = total - self._lost_before, total
        return lost

    def close(self, limit: float = LAST_LIMIT) -> None:
        """Wait until the lines are written, as long as the disk answers, at most `limit` seconds, and close the file. A
        later write reopens it."""
        if WRITER.submit(self._file.close, is_last=True):
            WRITER.flush(limit)

    def _append(self, line: bytes, lost: Callable[[], object], losses: int) -> None:
        if not self._file.write(line):
            self._lost += losses
            lost()


def _forget_in_child() -> None:
    for writer in list(_writers):
        writer._forget()


os.register_at_fork(after_in_child=_forget_in_child)
WRITER = Writer()
