"""Keeps workers' output in files, in a separate thread, which may block on a disk that does not answer.

A file that has reached its size limit becomes `<name>.1`, replaces an older one, and starts again. Data that cannot be
written is dropped and counted; when the file is writable again, a line in it says how much is missing at that point.
Beside each file, another one records when its bytes were read (`files.times_of`), because plain text has no times."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from resilience.adapters import files
from resilience.launcher.streams import StreamLost

if TYPE_CHECKING:
    from resilience.launcher.drain import Stream

ROOM = 16 << 20  # bytes queued for the disk
SLACK = 1 << 20  # bytes by which a file may exceed its limit, so that it ends with a whole line
STAMP_EVERY_NS = 10_000_000  # between two time stamps of 30 bytes each
REOPEN_EVERY = 1.0  # seconds between attempts to open a file
NO_ANSWER = "the disk does not answer"

Tell = Callable[[StreamLost], None]
Job = Callable[[], None]


class Keeper:
    """The thread that writes files, and its queue. One other thread calls the methods."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._files: dict[int, _StreamFile] = {}
        self._jobs: deque[tuple[Job, int]] = deque()
        self._waiting = 0  # bytes
        self._moved_at = 0.0  # when the disk last made progress, or was idle
        self._has_work = threading.Condition()
        threading.Thread(target=self._work, name="resilience-kept", daemon=True).start()

    @property
    def is_full(self) -> bool:
        return self._waiting > ROOM

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def stalled_for(self, now: float) -> float:
        """Return for how many seconds data has been waiting without disk progress."""
        with self._has_work:
            return now - self._moved_at if self._jobs else 0.0

    def open(self, stream: Stream) -> None:
        self._files[stream.number] = _StreamFile(stream.name, stream.path, stream.limit, self._tell)

    def take(self, stream: Stream, data: bytes, is_stalled: bool) -> None:
        """Queue data for writing. is_stalled: drop the data if the queue is full."""
        file = self._files[stream.number]
        read_ns = time.time_ns()
        if self.is_full and is_stalled:
            file.miss(len(data), NO_ANSWER)
        else:
            self._put(lambda: file.write(data, read_ns), len(data))

    def close(self, stream: Stream) -> None:
        self._put(self._files.pop(stream.number).close)

    def call(self, job: Job) -> None:
        """Run a job after all data queued so far is written."""
        self._put(job)

    def settle(self) -> None:
        """Report the losses so far of streams that are still open, at the end of the job."""
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


class _StreamFile:
    """One stream's file. Only `miss` is called from another thread than the keeper's."""

    def __init__(self, name: str, path: bytes, limit: int, tell: Tell) -> None:
        self._name, self._path, self._limit, self._tell = name, Path(os.fsdecode(path)), limit, tell
        self._times = files.LineFile(files.times_of(self._path))
        self._stamped_ns = 0
        self._fd: int | None = None
        self._open_at = 0.0
        self._size = 0
        self._is_line_over = True
        self._gap = 0  # bytes missing at the end of the file
        self._missed = 0
        self._reported = 0  # how many of these were reported
        self._was_reported_while_full = False  # so that report may be lost itself
        self._removed = 0
        self._why = ""

    def miss(self, count: int, cause: str) -> None:
        """Count output that is not in the file. Report the first loss immediately and again when the file is writable,
        others at the end."""
        is_first = not self._missed
        self._gap += count
        self._missed += count
        self._why = cause
        if is_first:
            self.report()
            self._was_reported_while_full = True

    def write(self, data: bytes, at_ns: int) -> None:
        """Append as much as possible. at_ns: when the data was read, UTC."""
        done = 0
        try:
            self._rotate()
            fd = self._opened()
            if self._gap:
                note = f"[resilience run: {self._gap:,} bytes are missing here: {self._why}]\n".encode()
                self._append(fd, note if self._is_line_over else b"\n" + note)
                self._gap = 0
                if self._was_reported_while_full:
                    self.report()
            self._stamp(at_ns)
            while done < len(data):
                done += self._append(fd, data[done:] if done else data)
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            self.miss(len(data) - done, getattr(error, "strerror", None) or str(error))

    def _stamp(self, at_ns: int) -> None:
        """Record when the following bytes were read. Readers estimate times that could not be recorded."""
        if at_ns - self._stamped_ns >= STAMP_EVERY_NS:
            self._stamped_ns = at_ns
            self._times.write(b"%d %d\n" % (self._size, at_ns))

    def close(self) -> None:
        self.report()
        self._times.close()
        if self._fd is not None:
            os.close(self._fd)

    def report(self) -> None:
        """Report missing bytes that were not reported yet."""
        if self._missed > self._reported or self._was_reported_while_full:
            self._lost("file", self._missed, self._why)
            self._reported, self._was_reported_while_full = self._missed, False

    def _lost(self, place: Literal["file", "rotated"], count: int, cause: str) -> None:
        self._tell(StreamLost(self._name, os.fsencode(self._path), place, count, cause))

    def _append(self, fd: int, data: bytes) -> int:
        """Write once; return how many bytes were written. Raises: OSError."""
        done = os.write(fd, data)
        self._size += done
        self._is_line_over = data[done - 1 : done] == b"\n"
        return done

    def _opened(self) -> int:
        """Return the descriptor; open the file if needed. Raises: OSError."""
        if self._fd is None:
            if time.monotonic() < self._open_at:
                raise OSError(0, self._why)
            self._open_at = time.monotonic() + REOPEN_EVERY
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._size = os.fstat(self._fd).st_size
        return self._fd

    def _rotate(self) -> None:
        """Start a new file if this one has reached its limit. Raises: OSError."""
        threshold = self._limit if self._is_line_over else self._limit + SLACK
        if self._fd is None or not self._limit or self._size < threshold:
            return
        older = self._path.with_name(f"{self._path.name}{files.ROTATED}")
        removed = older.stat().st_size if older.exists() else 0
        try:
            self._path.replace(older)
        except FileNotFoundError:  # somebody has deleted the file
            removed = 0
        os.close(self._fd)
        self._fd, self._open_at = None, 0.0
        self._stamped_ns = 0
        self._times.close()
        with contextlib.suppress(FileNotFoundError):
            self._times.path.replace(files.times_of(older))
        self._removed += removed
        if removed:
            self._lost("rotated", self._removed, f"files are rotated at {self._limit >> 20} MiB (--output-file-mb)")
