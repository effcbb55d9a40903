"""Shows workers' output at the terminal, in a thread of its own, which waits for a slow reader while nobody else does.

The queue is bounded. A stream's output that finds no room is not shown; when the reader has caught up, a line in its
place says how much that was, and which file holds it."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from resilience.adapters import terminal
from resilience.core.printable import printable_line
from resilience.launcher.streams import Lost

if TYPE_CHECKING:
    from resilience.launcher.drain import Stream

ROOM = 16 << 20  # bytes that wait for the reader
LONGEST_LINE = 1 << 16  # bytes; what is longer is shown in pieces
PATIENCE = 2.5  # seconds without a byte taken after which a reader is given up, at the end
WAIT = 0.2  # seconds of one attempt
WHY = "the reader was too slow"

Tell = Callable[[Lost], None]


class Shower:
    """The thread that writes to stdout, or to stderr, and its queue. Other methods are called by one other thread."""

    def __init__(self, to: int, tell: Tell) -> None:
        self._to, self._tell = terminal.stream(to), tell
        self._queue: deque[tuple[Stream | None, bytes]] = deque()  # None: a line of our own
        self._size = 0
        self._missed: dict[int, int] = {}  # bytes not shown, by the stream's number
        self._gaps: dict[Stream, int] = {}  # bytes not shown since the last line about it
        self._is_line_over = True  # of what is in the queue
        self._moved_at = time.monotonic()  # when the reader last took something, or there was nothing to take
        self._is_gone = False  # nobody can read any more
        self._has_work = threading.Condition()
        threading.Thread(target=self._work, name=f"resilience-shown-{to}", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return not self._queue and not self._gaps

    def is_stuck(self, now: float) -> bool:
        """Return True if the reader has taken nothing for so long that it is not waited for at the end."""
        with self._has_work:
            return self._is_gone or now - self._moved_at >= PATIENCE

    def take(self, stream: Stream, data: bytes) -> None:
        """Show it, later; not if there is no room, or if there was none and the reader has not caught up yet."""
        with self._has_work:
            if self._size > (ROOM // 2 if self._gaps else ROOM):
                self._gaps[stream] = self._gaps.get(stream, 0) + len(data)
                return
            self._fill_gaps()
            self._put(stream, data)

    def settle(self) -> None:
        """The job is over, and the reader is not waited for any more: report what it will not get."""
        with self._has_work:
            left = dict(self._gaps)
            for stream, data in self._queue:
                if stream is not None:
                    left[stream] = left.get(stream, 0) + len(data)
            self._queue.clear()
            self._gaps.clear()
        for stream, count in left.items():
            self._miss(stream, count, unsaid=count)

    def _miss(self, stream: Stream, count: int, unsaid: int = 0) -> None:
        self._missed[stream.number] = total = self._missed.get(stream.number, 0) + count
        self._tell(Lost(stream.name, stream.path, "terminal", total, WHY, unsaid))

    def _fill_gaps(self) -> None:
        """Say what was not shown."""
        for stream, count in self._gaps.items():
            self._miss(stream, count)
            where = f"; {printable_line(os.fsdecode(stream.path))} has it" if stream.path else ""
            note = f"[resilience run: {count:,} bytes of {stream.name} are not shown here, {WHY}{where}]\n"
            self._put(None, note.encode() if self._is_line_over else f"\n{note}".encode())
        self._gaps.clear()

    def _put(self, stream: Stream | None, data: bytes) -> None:
        if not self._queue:
            self._moved_at = time.monotonic()
        self._queue.append((stream, data))
        self._size += len(data)
        self._is_line_over = data.endswith(b"\n")
        self._has_work.notify()

    def _work(self) -> None:
        while True:
            with self._has_work:
                while not self._queue:
                    self._fill_gaps()
                    if not self._queue:
                        self._has_work.wait()
                stream, data = self._queue[0]
            began = time.monotonic()
            taken = terminal.put(self._to, data, began + WAIT)
            is_early = not taken and time.monotonic() - began < WAIT / 2
            with self._has_work:
                self._is_gone = is_early
                self._size -= taken
                if taken:
                    self._moved_at = time.monotonic()
                if self._queue:  # else the reader was given up meanwhile
                    self._queue.popleft()
                    if taken < len(data):
                        self._queue.appendleft((stream, data[taken:]))
            if is_early:
                time.sleep(WAIT)
