"""Shows workers' output at the terminal, in a separate thread: only this thread waits for a slow reader.

The queue is bounded. Output that does not fit is not shown; when the reader has caught up, a line in its place says
how many bytes are missing and which file holds them."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from resilience.facts.printable import printable_line
from resilience.launcher.output.drained_stream import Stream
from resilience.launcher.output.streams import StreamLost
from resilience.system import terminal

ROOM = 16 << 20  # bytes of memory for what waits for the reader
PIECE_COST = 128  # bytes of it for one piece besides its data: measured with tracemalloc, rounded up
LONGEST_LINE = 1 << 16  # bytes; longer lines are shown in pieces
PATIENCE = 2.5  # seconds without progress after which we give up on a reader at the end
WAIT = 0.2  # seconds of one write attempt
TOO_SLOW = "the reader was too slow"

Tell = Callable[[StreamLost], None]


class Shower:
    """The thread that writes to stdout or stderr, and its queue. One other thread calls the methods."""

    def __init__(self, to: int, tell: Tell) -> None:
        self._to, self._tell = terminal.stream(to), tell
        self._queue: deque[tuple[Stream | None, bytes]] = deque()  # None: one of our own lines
        self._size = 0
        self._missed: dict[int, int] = {}  # bytes not shown, by the stream's number
        self._gaps: dict[Stream, int] = {}  # bytes not shown since the last line about it
        self._is_line_over = True  # whether the queued data ends with a whole line
        self._moved_at = time.monotonic()  # when the reader last took something, or there was nothing to take
        self._error = ""  # of the last attempt to write
        self._why = TOO_SLOW  # why output that is missing now was not shown
        self._has_work = threading.Condition()
        threading.Thread(target=self._work, name=f"resilience-shown-{to}", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return not self._queue and not self._gaps

    def is_stuck(self, now: float, patience: float) -> bool:
        """Return True if the reader has taken nothing for so many seconds that we do not wait for it at the end."""
        with self._has_work:
            return bool(self._error) or now - self._moved_at >= patience

    def take(self, stream: Stream, data: bytes) -> None:
        """Queue data for the terminal. Drop it if the queue is full, or was full and the reader has not caught up."""
        with self._has_work:
            if self._size > (ROOM // 2 if self._gaps else ROOM):
                self._gaps[stream] = self._gaps.get(stream, 0) + len(data)
                return
            self._fill_gaps()
            self._put(stream, data)

    def settle(self) -> None:
        """Report what the reader will not receive: the job is over, and we no longer wait for it."""
        with self._has_work:
            lost_bytes = dict(self._gaps)
            for stream, data in self._queue:
                if stream is not None:
                    lost_bytes[stream] = lost_bytes.get(stream, 0) + len(data)
            self._queue.clear()
            self._size = 0
            self._gaps.clear()
        for stream, count in lost_bytes.items():
            self._miss(stream, count, unsaid=count)

    def _miss(self, stream: Stream, count: int, unsaid: int = 0) -> None:
        self._missed[stream.number] = total = self._missed.get(stream.number, 0) + count
        self._tell(StreamLost(stream.name, stream.path, "terminal", total, self._why, unsaid))

    def _fill_gaps(self) -> None:
        """Queue lines about output that was not shown."""
        for stream, count in self._gaps.items():
            self._miss(stream, count)
            where = f"; see {printable_line(os.fsdecode(stream.path))}" if stream.path else ""
            note = f"[resilience run: {count:,} bytes of {stream.name} are not shown here, {self._why}{where}]\n"
            self._put(None, note.encode() if self._is_line_over else f"\n{note}".encode())
        self._gaps.clear()

    def _put(self, stream: Stream | None, data: bytes) -> None:
        if not self._queue:
            self._moved_at = time.monotonic()
        self._queue.append((stream, data))
        self._size += PIECE_COST + len(data)
        self._is_line_over = data.endswith(b"\n")
        self._has_work.notify()

    def _work(self) -> None:
        while True:
            with self._has_work:
                while not self._queue:
                    self._fill_gaps()
                    if not self._queue:
                        self._has_work.wait()
                piece = stream, data = self._queue[0]
            taken, error = terminal.put_or_say_why(self._to, data, time.monotonic() + WAIT)
            with self._has_work:
                self._error = error
                if error or not self._gaps:
                    self._why = error or TOO_SLOW
                if taken:
                    self._moved_at = time.monotonic()
                    if stream is not None:
                        stream.note_shown(taken)
                if self._queue and self._queue[0] is piece:  # else `settle` has emptied the queue meanwhile
                    self._queue.popleft()
                    self._size -= taken
                    if taken < len(data):
                        self._queue.appendleft((stream, data[taken:]))
                    else:
                        self._size -= PIECE_COST
            if error:
                time.sleep(WAIT)
