"""Reads the account that a job leaves, while it is being written."""

from __future__ import annotations

from pathlib import Path

from resilience.errors import DecodeError
from resilience.facts.records import Record, from_line


class Account:
    """The records of a run folder. Each look reads only what was added since the last one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, int] = {}  # bytes of each file that are taken
        self._records: list[Record] = []

    def records(self) -> list[Record]:
        """All records so far, in the order of this host's monotonic clock; a torn last line waits for its end."""
        known = len(self._records)
        for path in self.folder.glob("records/*.jsonl"):
            self._take(path)
        if len(self._records) > known:
            self._records.sort(key=lambda record: record.mono_ns)
        return self._records

    def _take(self, path: Path) -> None:
        taken = self._read.get(path, 0)
        if path.stat().st_size <= taken:
            return
        with path.open("rb") as file:
            file.seek(taken)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read[path] = taken + len(whole) + len(newline)
        for line in whole.splitlines():
            try:
                self._records.append(from_line(line))
            except DecodeError:
                continue  # torn by a fault of the test
