"""One stdout or stderr of a worker, as the drain process reads it."""

from __future__ import annotations

import os

from resilience.launcher.output.byte_counts import KEPT, READ, SHOWN, ByteCounts
from resilience.launcher.output.streams import OpenStream

CHUNK = 1 << 16  # bytes per read: the capacity of a pipe


class Stream:
    """One worker's stdout or stderr."""

    def __init__(self, opened: OpenStream, fd: int, counts: ByteCounts) -> None:
        self.number, self.to, self.fd = opened.number, opened.to, fd
        self.name, self.path, self.limit = opened.name, opened.path, opened.limit
        self.missing, self.why_missing = opened.missing, opened.why_missing
        self._counts = counts
        self.partial_line = b""  # beginning of a line, not sent to the terminal yet
        self.partial_since = 0.0
        self.is_terminal = os.isatty(fd)

    def read(self) -> bytes | None:
        """Return available data, None at the end of the stream."""
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return b""
        except OSError:  # EIO: no process has the terminal's other end open
            return None
        self._counts.add(self.number, READ, len(data))
        return data or None

    def note_kept(self, count: int) -> None:
        """Count bytes that are in the file."""
        self._counts.add(self.number, KEPT, count)

    def note_shown(self, count: int) -> None:
        """Count bytes that the terminal has taken."""
        self._counts.add(self.number, SHOWN, count)
