"""When was a piece of plain text read?  The drain process notes that beside each file of workers' output."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from pathlib import Path

from resilience.adapters.files import times_of


class Stamps:
    """The times of one file, which may grow. Without a file of times there are none."""

    def __init__(self, path: Path) -> None:
        """path: of the text."""
        self._path = times_of(path)
        self._offsets, self._times = array("q"), array("q")
        self._read = 0  # bytes

    def at(self, position: int) -> int | None:
        """Return when the byte at a position was read, UTC nanoseconds; None if that is not known."""
        if not self._offsets or position >= self._offsets[-1]:
            self._read_on()
        number = bisect_right(self._offsets, position)
        return self._times[number - 1] if number else None

    def _read_on(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                more = file.read()
        except OSError:
            return
        whole, newline, _ = more.rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for line in whole.split(b"\n"):
            offset, _, at = line.partition(b" ")
            if offset.isdigit() and at.isdigit() and len(line) < 40 and self._is_next(int(offset), int(at)):
                self._offsets.append(int(offset))
                self._times.append(int(at))

    def _is_next(self, offset: int, at: int) -> bool:
        """Whether an entry can follow those before it; a damaged one cannot."""
        return max(offset, at) < 2**63 and (not self._offsets or offset >= self._offsets[-1])
