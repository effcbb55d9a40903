"""The record file: every record of a rank and of its monitor, one JSON object a line.

Written by the monitor, by the agent, or by a rank that has lost its monitor. Nothing about it steers
anything: a line that cannot be written is counted."""

from __future__ import annotations

from pathlib import Path

from resilience.adapters.files import LineFile
from resilience.core.records import Record, to_line


class RecordFile:
    """A sink that appends records to a file."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)
        self.dropped = 0

    def take(self, record: Record) -> bool:
        is_written = self._file.write(to_line(record))
        self.dropped += not is_written
        return is_written

    def close(self) -> None:
        self._file.close()
