"""Keeps workers' output in files, in a thread of its own, which may be held by a disk that does not answer.

A file that has reached its size becomes `<name>.1`, in place of an older one, and begins anew. What cannot be written
is dropped and counted; the file says how much is missing where, once it can be written again. Beside each file, another
one says when its bytes were read (`files.times_of`): plain text has no times of its own."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from resilience.adapters import files
from resilience.launcher.streams import Lost

if TYPE_CHECKING:
    from resilience.launcher.drain import Stream

ROOM = 16 << 20  # bytes that wait for the disk
SLACK = 1 << 20  # bytes by which a file may exceed its size, to be cut at the end of a line
STAMP_EVERY_NS = 10_000_000  # between two notes of the time: 30 bytes each
REOPEN_EVERY = 1.0  # seconds between attempts to open a file that could not be opened
NO_ANSWER = "the disk does not answer"

Tell = Callable[[Lost], None]
Job = Callable[[], None]


class Keeper:
    """The thread that writes files, and its queue. Other methods are called by one other thread."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._files: dict[int, _File] = {}
        self._jobs: deque[tuple[Job, int]] = deque()
        self._waiting = 0  # bytes
        self._moved_at = 0.0  # when the disk last took something, or had nothing to take
        self._has_work = threading.Condition()
        threading.Thread(target=self._work, name="resilience-kept", daemon=True).start()

    @property
    def is_full(self) -> bool:
        return self._waiting > ROOM

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def stalled_for(self, now: float) -> float:
        """Return the seconds for which there has been something to write and nothing was written."""
        with self._has_work:
            return now - self._moved_at if self._jobs else 0.0

    def open(self, stream: Stream) -> None:
        self._files[stream.number] = _File(stream.name, stream.path, stream.limit, self._tell)

    def take(self, stream: Stream, data: bytes, is_stalled: bool) -> None:
        """Write, later. is_stalled: drop it where the queue is full."""
        file = self._files[stream.number]
        at_ns = time.time_ns()
        if self.is_full and is_stalled:
            file.miss(len(data), NO_ANSWER)
        else:
            self._put(lambda: file.write(data, at_ns), len(data))

    def close(self, stream: Stream) -> None:
        self._put(self._files.pop(stream.number).close)

    def call(self, job: Job) -> None:
        """Do this when all that was taken before is written."""
        self._put(job)

    def settle(self) -> None:
        """The job is over: report what was lost so far of streams that are still open."""
        for file in list(self._files.values()):
            file.report()

    def _put(self, job: Job, size: int = 0) -> None:
        with self._has_work:
            if not self._jobs:
                self._moved_at = time.monotonic()
            self._jobs.append((job, size))
            self._waiting += size
            self._has_work.notify()

    def _work(self) -> None:
        while True:
            with self._has_work:
                while not self._jobs:
                    self._has_work.wait()
                job, size = self._jobs[0]
            job()
            with self._has_work:
                self._jobs.popleft()
                self._waiting -= size
                self._moved_at = time.monotonic()


class _File:
    """One stream's file. Only `miss` is called by another thread than the keeper's."""

    def __init__(self, name: str, path: bytes, limit: int, tell: Tell) -> None:
        self._name, self._path, self._limit, self._tell = name, Path(os.fsdecode(path)), limit, tell
        self._times = files.LineFile(files.times_of(self._path))
        self._stamped_ns = 0
        self._fd: int | None = None
        self._open_at = 0.0
        self._size = 0
        self._is_line_over = True
        self._gap = 0  # bytes that are missing at the end of the file
        self._missed = 0
        self._told = 0  # of those
        self._removed = 0
        self._why = ""

    def miss(self, count: int, why: str) -> None:
        """Count output that is not in the file; the first loss is reported at once, others at the end."""
        is_first = not self._missed
        self._gap += count
        self._missed += count
        self._why = why
        if is_first:
            self.report()

    def write(self, data: bytes, at_ns: int) -> None:
        """Append, as far as it can be done. at_ns: when the data were read, UTC."""
        done = 0
        try:
            self._rotate()
            fd = self._opened()
            if self._gap:
                note = f"[resilience run: {self._gap:,} bytes are missing here: {self._why}]\n".encode()
                self._append(fd, note if self._is_line_over else b"\n" + note)
                self._gap = 0
            self._stamp(at_ns)
            while done < len(data):
                done += self._append(fd, data[done:] if done else data)
        except (OSError, ValueError) as error:  # ValueError: a zero in the path
            self.miss(len(data) - done, getattr(error, "strerror", None) or str(error))

    def _stamp(self, at_ns: int) -> None:
        """Note when what follows was read. One that cannot be noted is estimated by readers."""
        if at_ns - self._stamped_ns >= STAMP_EVERY_NS:
            self._stamped_ns = at_ns
            self._times.write(b"%d %d\n" % (self._size, at_ns))

    def close(self) -> None:
        self.report()
        self._times.close()
        if self._fd is not None:
            os.close(self._fd)

    def report(self) -> None:
        """Report what is missing and was not reported yet."""
        if self._missed > self._told:
            self._lost("file", self._missed, self._why)
            self._told = self._missed

    def _lost(self, place: Literal["file", "rotated"], count: int, why: str) -> None:
        self._tell(Lost(self._name, os.fsencode(self._path), place, count, why))

    def _append(self, fd: int, data: bytes) -> int:
        """Write once; answers how much was taken. Raises: OSError."""
        done = os.write(fd, data)
        self._size += done
        self._is_line_over = data[done - 1 : done] == b"\n"
        return done

    def _opened(self) -> int:
        """Return the descriptor. Raises: OSError."""
        if self._fd is None:
            if time.monotonic() < self._open_at:
                raise OSError(0, self._why)
            self._open_at = time.monotonic() + REOPEN_EVERY
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._size = os.fstat(self._fd).st_size
        return self._fd

    def _rotate(self) -> None:
        """Begin a new file where this one has its size. Raises: OSError."""
        least = self._limit if self._is_line_over else self._limit + SLACK
        if self._fd is None or not self._limit or self._size < least:
            return
        older = self._path.with_name(f"{self._path.name}{files.ROTATED}")
        removed = older.stat().st_size if older.exists() else 0
        self._path.replace(older)
        self._times.close()
        self._times.path.replace(files.times_of(older))
        self._stamped_ns = 0
        os.close(self._fd)
        self._fd, self._open_at = None, 0.0
        self._removed += removed
        if removed:
            self._lost("rotated", self._removed, f"files are rotated at {self._limit >> 20} MiB (--output-file-mb)")
