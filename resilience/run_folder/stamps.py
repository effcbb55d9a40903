"""When was a piece of plain text read?  The drain process writes that next to each file of workers' output."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from pathlib import Path

from resilience.system.files import times_of


class Stamps:
    """The times of one file, which may grow; none if there is no file of times."""

    def __init__(self, path: Path) -> None:
        """path: the text file."""
        self._path = times_of(path)
        self._offsets, self._times = array("q"), array("q")
        self._read = 0  # bytes

    def at(self, position: int) -> int | None:
        """Return when the byte at a position was read, UTC nanoseconds; None if unknown."""
        if not self._offsets or position >= self._offsets[-1]:
            self._read_new_entries()
        number = bisect_right(self._offsets, position)
        return self._times[number - 1] if number else None

    def _read_new_entries(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                new_bytes = file.read()
        except OSError:
            return
        complete, newline, _ = new_bytes.rpartition(b"\n")
        self._read += len(complete) + len(newline)
        for line in complete.split(b"\n"):
            offset, _, at = line.partition(b" ")
            if offset.isdigit() and at.isdigit() and len(line) < 40 and self._is_next(int(offset), int(at)):
                self._offsets.append(int(offset))
                self._times.append(int(at))

    def _is_next(self, offset: int, at: int) -> bool:
        """Return True if an entry can follow the previous ones; a damaged one cannot."""
        return max(offset, at) < 2**63 and (not self._offsets or offset >= self._offsets[-1])
