"""What does a forked worker report to its agent about its imports?  Notes in memory that both have mapped.

The worker writes without waiting, and without a descriptor that its program would see. Its notes survive it, even if
it is killed. Notes that do not fit are dropped. So are notes of processes that the worker forks, because they share
this memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading

import msgspec

from resilience.errors import DecodeError
from resilience.facts import encoding

SIZE = 1 << 16  # bytes for one worker
_used = struct.Struct("=I")


class ModuleImported(msgspec.Struct, frozen=True, array_like=True, tag="import"):
    """The program imported a module that it would have found preloaded, if the zygote knew it."""

    module: str


class VariablesSetTooLate(msgspec.Struct, frozen=True, array_like=True, tag="late"):
    """The program set variables that a package reads when it is imported. In a warm worker that had happened before."""

    package: str
    names: tuple[str, ...]


Note = ModuleImported | VariablesSetTooLate
_decode = encoding.reader(Note)


class NotesWriter:
    """The worker's side. memory: a descriptor, offset: of this worker's part."""

    def __init__(self, memory: int, offset: int) -> None:
        self._memory = mmap.mmap(memory, SIZE, offset=offset)
        self._end = _used.size
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may import a module while this thread writes

    def write(self, note: Note) -> None:
        if os.getpid() != self._pid:
            return
        data = encoding.to_json(note) + b"\n"
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

    def read(self) -> list[Note]:
        """Return the notes that were written since the last call, without any that the program has damaged."""
        (end,) = _used.unpack_from(self._memory, 0)
        if not self._read < end <= SIZE:
            return []
        data = self._memory[self._read : end]
        self._read = end
        notes: list[Note] = []
        for line in data.splitlines():
            with contextlib.suppress(DecodeError):
                notes.append(_decode(line))
        return notes
