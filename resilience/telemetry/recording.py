"""The record file: every record of a rank and of its monitor, one JSON object a line.

Written by the monitor, by the agent, or by a rank that has lost its monitor. Nothing about it steers
anything: a line that cannot be written is counted."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from resilience.adapters import files
from resilience.adapters.background import BackgroundFile
from resilience.core import encoding
from resilience.core.configuration import Configuration
from resilience.core.identity import Nanoseconds, Natural, WorldSize
from resilience.core.records import Record, from_line, to_line
from resilience.errors import DecodeError

JOB_FILE = "job.json"
READ_AT_ONCE = 4 << 20  # bytes of one file a look


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """The file job.json of a run folder: what the job is. Written once, by whoever is first.

    configuration: what decides how long its steps take. traceparent: what TRACEPARENT said, the span that all of the
    job's are part of. command: with secrets masked (`core.masking`). launch: equal in all folders of one launch, on
    whatever disks. Only the owner may read the file."""

    job_id: str
    attempt: Natural = 0
    created_wall_ns: Nanoseconds = 0
    function: str = ""
    command: tuple[str, ...] = ()
    world_size: WorldSize | None = None
    hostname: str = ""
    resilience_version: str = ""
    torch_version: str = ""
    python_version: str = ""
    configuration: Configuration = Configuration()
    traceparent: str = ""
    launch: str = ""
    schema: int = 1

    def write(self, folder: Path) -> bool:
        """Create the file; answers False if it is there already, or could not be written."""
        return files.create(folder / JOB_FILE, encoding.to_json_page(self), is_private=True)


_job = encoding.reader(Job, strict=False)


def read_job(folder: Path) -> Job:
    """Read the file job.json of a run folder. Raises: OSError, DecodeError."""
    return _job((folder / JOB_FILE).read_bytes())


class RecordFile:
    """A sink that appends records to a file."""

    def __init__(self, path: Path) -> None:
        self._file = BackgroundFile(path)
        self.dropped = 0

    def take(self, record: Record) -> bool:
        """Have the record written soon; return False if it is refused, because the disk does not answer."""
        is_taken = self._file.write(to_line(record))
        self.dropped += not is_taken
        return is_taken

    def take_lost(self) -> int:
        """Return how many records that were taken could not be written, since the last call."""
        lost = self._file.take_lost()
        self.dropped += lost
        return lost

    def close(self) -> None:
        """Wait a moment until all is written, and close the file."""
        self._file.close()


class RecordTail:
    """Reads a record file that grows."""

    def __init__(
        self, path: Path, last: int | None = None, until: int = READ_AT_ONCE, without: bytes | None = None
    ) -> None:
        """last: bytes at the end of the file with which reading begins; None: read all of it. until: bytes that are
        read at once, at most. without: lines that hold this are left out, but not the last one of a look."""
        self._path = path
        self._last = last
        self._at_once = until
        self._without = without
        self._taken = 0  # bytes

    def added(self) -> list[Record]:
        """Return the complete records that were added since the last look; a line that is none was torn.

        Costs a `stat` where nothing was. A file that cannot be read has nothing new."""
        try:
            if self._path.stat().st_size <= self._taken:
                return []
            with self._path.open("rb") as file:
                if self._last is not None and not self._taken:
                    self._taken = max(
                        0, file.seek(0, os.SEEK_END) - self._last
                    )  # the first line may lack its beginning
                file.seek(self._taken)
                whole, newline, rest = file.read(self._at_once).rpartition(b"\n")
        except OSError:
            return []
        if not newline and len(rest) == self._at_once:
            self._taken += len(rest)  # no line of ours is that long
            return []
        self._taken += len(whole) + len(newline)
        lines = whole.split(b"\n")
        if (without := self._without) is not None:
            lines = [line for line in lines[:-1] if without not in line] + lines[-1:]
        found = []
        for line in lines:
            try:
                found.append(from_line(line))
            except DecodeError:
                continue
        return found
