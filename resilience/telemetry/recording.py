"""The record file: every record of a rank and of its monitor, one JSON object per line.

Written by the monitor, by the agent, or by a rank that has lost its monitor. No decision depends on it: a line that
cannot be written is only counted."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from resilience.errors import DecodeError
from resilience.facts import encoding
from resilience.facts.configuration import Configuration, abridged
from resilience.facts.events import TelemetryDropped
from resilience.facts.identity import Job
from resilience.facts.masking import masked
from resilience.facts.records import EVENT, Record, from_line, from_lines, to_line
from resilience.system import files
from resilience.system.background import BackgroundFile
from resilience.system.environment import launched_folder, local_world_size

JOB_FILE = "job.json"
READ_AT_ONCE = 4 << 20  # bytes of one file per read


_job = encoding.reader(Job, strict=False)


def write_job(job: Job, folder: Path) -> bool:
    """Create the file job.json, for its owner only. Return False if it exists already or could not be written."""
    return files.create(folder / JOB_FILE, encoding.to_json_page(job), is_private=True)


def read_job(folder: Path) -> Job:
    """Read the file job.json of a run folder. Raises: OSError, DecodeError."""
    return _job((folder / JOB_FILE).read_bytes())


def configuration_of(folder: Path | None, key: str, world_size: int) -> Configuration:
    """Return the configuration of the launcher's run, if this process belongs to one; else that of this process.

    folder: of the run. key: the workload's name, if the user gives one."""
    import torch  # late: only ranks ask, and they have it; a monitor starts faster without it

    if launched_folder() is not None and folder is not None:
        with contextlib.suppress(OSError, DecodeError):
            return read_job(folder).configuration
    script, *arguments = masked(sys.argv) or ("",)
    kept = abridged(arguments)
    return Configuration(script, key, world_size, local_world_size() or 0, kept, str(torch.__version__))


class RecordFile:
    """A sink that appends records to a file."""

    def __init__(self, path: Path) -> None:
        self._file = BackgroundFile(path)
        self._refused = 0
        self._unwritten = 0  # accepted records that could not be written, counted by the writer's thread

    @property
    def dropped(self) -> int:
        """Return how many records were refused or could not be written so far. Reports of such losses do not count."""
        return self._refused + self._unwritten

    def take(self, record: Record) -> bool:
        """Queue the record for writing; return False if it is refused because the disk does not answer."""
        reported = _reported_losses(record)
        is_taken = self._file.write(to_line(record), lambda: self._note_unwritten(reported), reported or 1)
        self._refused += not is_taken and not reported
        return is_taken

    def take_lost(self) -> int:
        """Return how many accepted records could not be written since the last call. A lost report of losses counts as
        the losses that it reported."""
        return self._file.take_lost()

    def close(self) -> None:
        """Wait briefly until all records are written, then close the file."""
        self._file.close()

    def _note_unwritten(self, reported: int) -> None:
        self._unwritten += not reported


def _reported_losses(record: Record) -> int:
    """Return how many lost records a record reports."""
    match record.event:
        case TelemetryDropped("record", "sink", count):
            return count
        case _:
            return 0


class RecordTail:
    """Reads a record file that grows."""

    def __init__(
        self, path: Path | str, last: int | None = None, first: int = 0, without: tuple[bytes, ...] = ()
    ) -> None:
        """last: start reading this many bytes before the end of the file; None: read all of it. first: read this many
        bytes of its beginning too, if they come before those. without: skip lines whose event begins like one of these
        (`facts.records.beginnings`), except the last line of a read.

        Attributes: `beginning`, the records of the beginning, once `added` was called; `damaged`, the number of lines
        so far that are no records, of those not skipped; `error`, why the file could not be read last, empty if it
        could."""
        self.beginning: list[Record] = []
        self.damaged = 0
        self.error = ""
        self._path = path
        self._last = last
        self._first = first
        self._without = without
        self._offset = 0  # bytes
        self._is_cut = False  # the next line lacks its beginning

    def added(self, size: int | None = None) -> list[Record]:
        """Return the complete records added since the last call; count lines that are not records, which were torn.

        size: current size of the file, if known; otherwise `stat` is called. An unreadable file has nothing new."""
        beginning = b""
        try:
            size = os.stat(self._path).st_size if size is None else size
            if size <= self._offset:
                return []
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if self._last is not None and not self._offset:
                    self._offset = max(0, size - self._last)
                    self._is_cut = self._offset > 0
                    beginning = os.pread(file, min(self._first, self._offset), 0)
                content = os.pread(file, min(READ_AT_ONCE, size - self._offset), self._offset)
            finally:
                os.close(file)
        except OSError as error:
            self.error = error.strerror or str(error)
            return []
        self.error = ""
        whole, newline, partial_line = content.rpartition(b"\n")
        if not newline and len(partial_line) == READ_AT_ONCE:
            self._offset += len(partial_line)  # none of our lines is that long
            return []
        self._offset += len(whole) + len(newline)
        lines = whole.split(b"\n") if whole else []
        if self._is_cut and newline:
            lines, self._is_cut = lines[1:], False
        if beginning:
            self.beginning = self._records(self._wanted(beginning.split(b"\n")[:-1]))
        return self._records([*self._wanted(lines[:-1]), *lines[-1:]])

    def _wanted(self, lines: list[bytes]) -> list[bytes]:
        without = self._without
        return [line for line in lines if not line.startswith(without, line.find(EVENT))] if without else lines

    def _records(self, lines: list[bytes]) -> list[Record]:
        lines = [line for line in lines if line]
        with contextlib.suppress(DecodeError):  # on an error, decode line by line to find the bad ones
            records = from_lines(b"\n".join(lines))
            if len(records) == len(lines):
                return records
        records = []
        for line in lines:
            try:
                records.append(from_line(line))
            except DecodeError:
                self.damaged += 1
        return records
