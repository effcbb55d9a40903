"""One stdout or stderr of a worker, as the drain process reads it."""

from __future__ import annotations

import os

from resilience.launcher.output.streams import OpenStream

CHUNK = 1 << 16  # bytes per read: the capacity of a pipe


class Stream:
    """One worker's stdout or stderr."""

    def __init__(self, opened: OpenStream, fd: int) -> None:
        self.number, self.to, self.fd = opened.number, opened.to, fd
        self.name, self.path, self.limit = opened.name, opened.path, opened.limit
        self.partial_line = b""  # beginning of a line, not sent to the terminal yet
        self.partial_since = 0.0
        self.is_terminal = os.isatty(fd)

    def read(self) -> bytes | None:
        """Return available data, None at the end of the stream."""
        try:
            return os.read(self.fd, CHUNK) or None
        except BlockingIOError:
            return b""
        except OSError:  # EIO: no process has the terminal's other end open
            return None
