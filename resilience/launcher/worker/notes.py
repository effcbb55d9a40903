"""What does a forked worker report to its agent about its imports?  Lines in memory that both have mapped.

The worker writes without waiting, and without a descriptor that its program would see. Its lines survive it, even if
it is killed. Lines that do not fit are dropped. So are lines of processes that the worker forks, because they share
this memory."""

from __future__ import annotations

import mmap
import os
import struct
import threading

SIZE = 1 << 16  # bytes for one worker
_used = struct.Struct("=I")


class NotesWriter:
    """The worker's side. memory: a descriptor, offset: of this worker's part."""

    def __init__(self, memory: int, offset: int) -> None:
        self._memory = mmap.mmap(memory, SIZE, offset=offset)
        self._end = _used.size
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may import a module while this thread writes

    def write(self, line: str) -> None:
        if os.getpid() != self._pid:
            return
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            if self._end + len(data) <= SIZE:
                self._memory[self._end : self._end + len(data)] = data
                self._end += len(data)
                _used.pack_into(self._memory, 0, self._end)  # last, because the agent may read at any moment


class NotesReader:
    """The agent's side."""

    def __init__(self, memory: int, offset: int) -> None:
        self._memory = mmap.mmap(memory, SIZE, prot=mmap.PROT_READ, offset=offset)
        self._read = _used.size

    def read(self) -> list[str]:
        """Return the lines that were written since the last call."""
        (end,) = _used.unpack_from(self._memory, 0)
        if not self._read < end <= SIZE:
            return []
        data = self._memory[self._read : end]
        self._read = end
        return data.decode("utf-8", "replace").splitlines()
