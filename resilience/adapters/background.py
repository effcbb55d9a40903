"""Does what a disk may hold up, in a thread of its own.

A file server that does not answer holds whoever writes to it, or only looks at it, for as long as it likes; no timeout
and no signal ends that. So rank, monitor and agent leave it to the one thread of a `Writer`. Its queue is bounded:
what finds no room is refused, and the caller counts it. After a fork the child has a writer of its own."""

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

from resilience.adapters import files

THREAD = "resilience-writes"
MOST = 4096  # jobs that wait for the disk
ASK_LIMIT = 5.0  # seconds for a place to prove that it can be used
STALL = 1.0  # seconds for one of them, after which the disk is taken for one that does not answer
LAST_LIMIT = 10.0  # seconds for a slow disk to take the last lines; one that does not answer is given STALL
LOOK = 0.05  # seconds between two looks whether the disk still answers
READ_LIMIT = 2.0  # seconds for a disk to show what it has: longer than STALL, so only one that hangs exceeds it
NO_ANSWER = "the disk does not answer"

T = TypeVar("T")
_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


class Writer:
    """The thread and its queue. Safe to use from any thread; starts with the first job."""

    def __init__(self) -> None:
        self._forget()
        _writers.add(self)

    def _forget(self) -> None:
        """Begin anew. In a forked child the thread, its locks and its jobs are the parent's."""
        self._starting = threading.Lock()
        # Of C, so that an exception which interrupts the caller leaves no lock behind.
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._since: float | None = None  # when the present job began

    @property
    def is_stalled(self) -> bool:
        """Whether the disk does not answer."""
        since = self._since
        return since is not None and time.monotonic() - since > STALL

    def submit(self, job: Callable[[], object]) -> bool:
        """Do this after all that was submitted before; return False if there is no room. The job must not raise."""
        if self._jobs.qsize() >= MOST:
            return False
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, args=(self._jobs,), name=THREAD, daemon=True)
                    self._thread.start()
        self._jobs.put(job)
        return True

    def end(self, limit: float = LAST_LIMIT) -> None:
        """Do what was submitted, at most `limit` seconds, and end the thread. A later job starts another one."""
        thread = self._thread
        if thread is not None:
            is_done = self.flush(limit)
            self.leave()
            if is_done:
                thread.join(limit)

    def ask(self, function: Callable[[], T], limit: float) -> T:
        """Do this, wait for it, and return what it returns.

        Raises: what it raises; OSError if that takes more than `limit` seconds, or the disk does not answer already."""
        answer: list[T] = []
        error: list[BaseException] = []
        is_done = threading.Event()

        def job() -> None:
            try:
                answer.append(function())
            except BaseException as raised:  # handed over to the caller
                error.append(raised)
            is_done.set()

        if self.is_stalled or not self.submit(job) or not is_done.wait(limit):
            raise OSError(errno.ETIMEDOUT, NO_ANSWER)
        if error:
            raise error[0]
        return answer[0]

    def leave(self) -> None:
        """End the thread when it has done what was submitted. A later job starts another one. Does not wait."""
        self._jobs.put(None)
        self._forget()

    def flush(self, limit: float = LAST_LIMIT) -> bool:
        """Wait until all that was submitted is done, as long as the disk answers, at most `limit` seconds; return
        whether it is."""
        if self._thread is None:
            return True
        is_done = threading.Event()
        deadline = time.monotonic() + limit
        if self.is_stalled or not self.submit(is_done.set):
            return False
        while not is_done.wait(min(LOOK, max(0.0, deadline - time.monotonic()))):
            if self.is_stalled or time.monotonic() >= deadline:
                return is_done.is_set()
        return True

    def replace(self, path: Path, content: bytes) -> bool:
        """Write a whole file, later; return False if it is refused. Where the disk does not answer, it is: a newer
        content comes soon."""
        return not self.is_stalled and self.submit(lambda: files.replace(path, content))

    def _work(self, jobs: queue.SimpleQueue[Callable[[], object] | None]) -> None:
        while (job := jobs.get()) is not None:
            self._since = time.monotonic()
            with contextlib.suppress(Exception):  # the thread's edge: one job that raises must not end the others
                job()
            self._since = None


def asked(function: Callable[[], T], limit: float = ASK_LIMIT) -> T:
    """Do this in a thread of its own, wait for it, and return what it returns: for a place that may prove to be
    unusable, and is then given up. Raises: what the function raises, OSError if it takes longer than `limit` seconds.
    """
    writer = Writer()
    try:
        return writer.ask(function, limit)
    finally:
        writer.leave()


class BackgroundFile:
    """A file of lines, written by the writer's thread."""

    def __init__(self, path: Path) -> None:
        self._file = files.LineFile(path)
        self._lost = 0  # lines that were taken and could not be written

    def write(self, line: bytes) -> bool:
        """Append a line (newline included), later; return False if it is refused."""
        return WRITER.submit(lambda: self._append(line))

    def write_now(self, line: bytes, limit: float) -> bool:
        """Append a line and wait for that, `limit` seconds at most; return whether it is written, or will be when the
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
        """Return how many lines that were taken could not be written, since the last call."""
        lost, self._lost = self._lost, 0
        return lost

    def close(self, limit: float = LAST_LIMIT) -> None:
        """Wait until the lines are written, as long as the disk answers, at most `limit` seconds, and close the file. A
        later write opens it."""
        if WRITER.submit(self._file.close):
            WRITER.flush(limit)

    def _append(self, line: bytes) -> None:
        self._lost += not self._file.write(line)


def _forget_in_child() -> None:
    for writer in list(_writers):
        writer._forget()


os.register_at_fork(after_in_child=_forget_in_child)
WRITER = Writer()
