"""Keeps workers' output in files, in a separate thread, which may block on a disk that does not answer.

A file that has reached its size limit becomes `<name>.1`, replaces an older one, and starts again. Data that cannot be
written is dropped and counted; when the file is writable again, a line in it says how much is missing at that point.
Beside each file, another one records when its bytes were read (`files.times_of`), because plain text has no times."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from resilience.errors import error_in_words
from resilience.launcher.output.drained_stream import Stream
from resilience.launcher.output.streams import StreamLost
from resilience.system import files

ROOM = 16 << 20  # bytes of memory for what waits for the disk
JOB_COST = 512  # bytes of it for one job besides its data: measured with tracemalloc, rounded up
SLACK = 1 << 20  # bytes by which a file may exceed its limit, so that it ends with a whole line
STAMP_EVERY_NS = 10_000_000  # between two time stamps of 30 bytes each
REOPEN_EVERY = 1.0  # seconds between attempts to open a file
NO_ANSWER = "the disk does not answer"

Tell = Callable[[StreamLost], None]


class Keeper:
    """The thread that writes files, and its queue. One other thread calls the methods."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._files: dict[int, _StreamFile] = {}  # by stream, until all its data is written
        self._gaps = Counter[int]()  # by stream, bytes dropped since the last data that was queued
        self._jobs: deque[_Job] = deque()
        self._waiting = 0  # bytes of memory
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
        self._files[stream.number] = _StreamFile(stream, self._tell)

    def take(self, stream: Stream, data: bytes, is_stalled: bool) -> None:
        """Queue data for writing. is_stalled: drop the data if the queue is full."""
        file = self._files[stream.number]
        if self.is_full and is_stalled:
            self._gaps[stream.number] += len(data)
            file.losses.add(len(data), NO_ANSWER)
            return
        read_ns = time.time_ns()
        dropped = self._gaps.pop(stream.number, 0)
        self._put(_Job(functools.partial(file.write, data, read_ns, dropped), stream.number, len(data)))

    def close(self, stream: Stream) -> None:
        dropped = self._gaps.pop(stream.number, 0)
        self._put(_Job(lambda: self._files.pop(stream.number).close(dropped)))

    def call(self, job: Callable[[], None]) -> None:
        """Run a job after all data queued so far is written."""
        self._put(_Job(job))

    def settle(self) -> None:
        """Report the output that no file has now: the job is over, and we no longer wait for the disk."""
        waiting = Counter[int]()
        with self._has_work:
            for job in self._jobs:
                waiting[job.stream] += job.size
        for number, file in list(self._files.items()):
            file.losses.report(waiting[number])

    def _put(self, job: _Job) -> None:
        with self._has_work:
            if not self._jobs:
                self._moved_at = time.monotonic()
            self._jobs.append(job)
            self._waiting += JOB_COST + job.size
            self._has_work.notify()

    def _work(self) -> None:
        while True:
            with self._has_work:
                while not self._jobs:
                    self._has_work.wait()
                job = self._jobs[0]
            try:
                job.run()
            except Exception as error:  # the edge of the thread: it goes on with the next job, and counts what is lost
                if job.size and job.stream in self._files:
                    self._files[job.stream].losses.add(job.size, error_in_words(error))
            with self._has_work:
                self._jobs.popleft()
                self._waiting -= JOB_COST + job.size
                self._moved_at = time.monotonic()


class _Job(NamedTuple):
    """A call that waits for the disk. size: bytes of a stream's data that it writes."""

    run: Callable[[], None]
    stream: int = 0
    size: int = 0


class _Losses:
    """Counts the output that is not in one stream's file, and reports the sum. For both threads."""

    def __init__(self, tell: Callable[[int, str], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._missed = 0  # bytes
        self._reported = 0  # how many of them were reported
        self._was_reported_while_full = False  # so that report may be lost itself
        self._why = ""

    def add(self, count: int, cause: str) -> None:
        """Count missing bytes. Report the first loss immediately, others at the end."""
        with self._lock:
            is_first = not self._missed
            self._missed += count
            self._why = cause
            if is_first:
                self._report(self._missed, cause)
                self._was_reported_while_full = True

    def report_again(self) -> None:
        """Report the loss once more if its first report may be lost: the disk is writable again."""
        with self._lock:
            if self._was_reported_while_full:
                self._report(self._missed, self._why)

    def report(self, waiting: int = 0) -> None:
        """Report missing bytes that were not reported yet. waiting: bytes that are missing too if the disk does not
        answer any more."""
        with self._lock:
            if self._missed + waiting > self._reported or self._was_reported_while_full:
                self._report(self._missed + waiting, NO_ANSWER if waiting else self._why)

    def _report(self, count: int, cause: str) -> None:
        self._tell(count, cause)
        self._reported, self._was_reported_while_full = count, False


class _StreamFile:
    """One stream's file. Only its losses are for both threads."""

    def __init__(self, stream: Stream, tell: Tell) -> None:
        self._stream, self._tell = stream, tell
        self._path = Path(os.fsdecode(stream.path))
        self.losses = _Losses(lambda count, cause: self._lost("file", count, cause))
        self._times = files.LineFile(files.times_of(self._path))
        self._stamped_ns = 0
        self._fd: int | None = None
        self._open_at = 0.0
        self._size = 0
        self._is_line_over = True
        self._gap = stream.missing  # bytes missing at the end of the file
        self._removed = 0
        self._why = stream.why_missing

    def write(self, data: bytes, at_ns: int, dropped: int = 0) -> None:
        """Append as much as possible. at_ns: when the data was read, UTC. dropped: bytes before it that were not
        queued."""
        self._widen_gap(dropped, NO_ANSWER)
        done = 0
        try:
            self._rotate()
            fd = self._opened()
            self._mark_gap(fd)
            self._stamp(at_ns)
            while done < len(data):
                written = self._append(fd, data[done:] if done else data)
                self._stream.note_kept(written)
                done += written
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            missing, why = len(data) - done, getattr(error, "strerror", None) or str(error)
            self._widen_gap(missing, why)
            self.losses.add(missing, why)

    def _widen_gap(self, count: int, why: str) -> None:
        if count:
            self._gap += count
            self._why = why

    def _mark_gap(self, fd: int) -> None:
        """Append a line about what is missing at the end of the file. Raises: OSError."""
        if self._gap:
            note = f"[resilience run: {self._gap:,} bytes are missing here: {self._why}]\n".encode()
            self._append(fd, note if self._is_line_over else b"\n" + note)
            self._gap = 0
            self.losses.report_again()

    def _stamp(self, at_ns: int) -> None:
        """Record when the following bytes were read. Readers estimate times that could not be recorded."""
        if not 0 <= at_ns - self._stamped_ns < STAMP_EVERY_NS:  # the clock may be set back
            self._stamped_ns = at_ns
            self._times.write(b"%d %d\n" % (self._size, at_ns))

    def close(self, dropped: int) -> None:
        self._widen_gap(dropped, NO_ANSWER)
        if self._gap:
            with contextlib.suppress(OSError, ValueError):
                self._mark_gap(self._opened())
        self.losses.report()
        self._times.close()
        self._close_file()

    def _close_file(self) -> None:
        fd, self._fd = self._fd, None
        files.close(fd)

    def _lost(self, place: Literal["file", "rotated"], count: int, cause: str) -> None:
        stream = self._stream
        self._tell(StreamLost(stream.name, stream.path, place, count, cause, is_shown=stream.to != 0))

    def _append(self, fd: int, data: bytes) -> int:
        """Write once; return how many bytes were written. Raises: OSError."""
        try:
            done = os.write(fd, data)
        except OSError as error:
            if files.is_lost(error):
                self._close_file()  # it is opened again, at the earliest REOPEN_EVERY after the last time
            raise
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
            self._is_line_over = not self._size or not files.ends_torn(self._path)
        return self._fd

    def _rotate(self) -> None:
        """Start a new file if this one has reached its limit. Raises: OSError."""
        limit = self._stream.limit
        threshold = limit if self._is_line_over else limit + SLACK
        if self._fd is None or not limit or self._size < threshold:
            return
        older = self._path.with_name(f"{self._path.name}{files.ROTATED}")
        removed = older.stat().st_size if older.exists() else 0
        try:
            self._path.replace(older)
        except FileNotFoundError:  # somebody has deleted the file
            removed = 0
        self._close_file()
        self._open_at = 0.0
        self._stamped_ns = 0
        self._times.close()
        with contextlib.suppress(FileNotFoundError):
            self._times.path.replace(files.times_of(older))
        self._removed += removed
        if removed:
            self._lost("rotated", self._removed, f"files are rotated at {limit >> 20} MiB (--output-file-mb)")
