"""How many bytes of each stream has a drain process read, kept in its file and shown?

The counts lie in memory that it shares with the agent, so they outlive a killed drain process. Each process has counts
of its own, from zero."""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

SLOTS = 1 << 14  # streams that are counted at a time: each takes a descriptor, so there are never as many
READ, KEPT, SHOWN = range(3)


class StreamCounts(NamedTuple):
    """Bytes of one stream."""

    read: int
    kept: int
    shown: int


class ByteCounts:
    """The counts of all streams. Each one has a single writer: a thread of the drain process."""

    def __init__(self, fd: int) -> None:
        """fd: of the shared memory. Raises: OSError."""
        self.fd = fd
        self._counts = memoryview(mmap.mmap(fd, SLOTS * len(StreamCounts._fields) * 8)).cast("Q")

    @classmethod
    def create(cls) -> ByteCounts:
        """Return counts of zero. Raises: OSError."""
        fd = os.memfd_create("resilience-drain", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, SLOTS * len(StreamCounts._fields) * 8)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def add(self, stream: int, which: int, count: int) -> None:
        """which: READ, KEPT or SHOWN."""
        self._counts[stream % SLOTS * len(StreamCounts._fields) + which] += count

    def of(self, stream: int) -> StreamCounts:
        first = stream % SLOTS * len(StreamCounts._fields)
        return StreamCounts(*self._counts[first : first + len(StreamCounts._fields)])

    def close(self) -> None:
        """Close the descriptor; the counts stay readable."""
        os.close(self.fd)
