"""What is in a run folder?  All of it that can be read, and a list of what cannot.

A run folder may be unfinished, torn in the middle of a line, copied without some of its files, or
unreadable in places: the reader takes what is there and notes the rest with file and line. It judges
nothing; `attribution.incidents` and `analysis.report` do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path

import msgspec

from resilience.attribution.advice import named
from resilience.core import events
from resilience.core.records import SCHEMA, Record, from_line
from resilience.errors import DecodeError
from resilience.history.completeness import Completeness
from resilience.telemetry.recording import JOB_FILE, Job, read_job

RECORDS = "records"
NOTED = 20  # unreadable lines noted one by one a file; further ones are counted


class Missing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that is not there, or could not be understood. line: from 1."""

    file: str
    what: str
    line: int | None = None


class Run(msgspec.Struct, frozen=True):
    """A run folder as far as it can be read. records: by file, in the order of each file."""

    folder: Path
    job: Job | None
    records: tuple[Record, ...]
    missing: tuple[Missing, ...]
    completeness: Completeness = Completeness()


class Reader:
    """A run folder that is read once, file by file: what is held is one file's records, not the run's.

    records: iterate once; `missing` and `completeness` are final afterwards. What the folder contains never raises."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._missing: list[Missing] = []
        self.job = _job(folder, self._missing)
        self.completeness = Completeness()
        self._stacks: dict[object, object] = {}

    @property
    def missing(self) -> tuple[Missing, ...]:
        """What could not be read, so far."""
        return tuple(self._missing)

    @property
    def records(self) -> Iterator[Record]:
        """All records, by file, in the order of each file."""
        size, damaged = 0, {}
        seen: set[int] = set()
        before = len(self._missing)
        paths = _listed(self.folder / RECORDS, self._missing)
        if not paths and len(self._missing) == before == 0:
            self._missing.append(Missing(RECORDS, "holds no record files"))
        for path in paths:
            of_file, lost = _read(path, self._missing)
            lost += _note_gaps(f"{RECORDS}/{path.name}", of_file, self._missing)
            if lost:
                damaged[path.stem] = lost
            seen.update(rank for record in of_file if (rank := record.origin.initial_rank) is not None)
            for record in of_file:
                kind = type(record.event)
                if kind is events.CallStarted:
                    size = max(size, record.event.world_size)  # type: ignore[union-attr]
                yield self._shared(record) if kind is events.OutcomeSeen else record
        absent = sorted(set(range(size)) - seen)
        if absent:  # they must have been there and left nothing
            self._missing.append(Missing(RECORDS, f"nothing of {named(absent)}"))
        self.completeness = _completeness([path.stem for path in paths], damaged, seen, absent)

    def _shared(self, record: Record) -> Record:
        """Hold a stack once, however many ranks were there."""
        event = record.event
        if not isinstance(event, events.OutcomeSeen) or not event.stack:
            return record
        stack = self._stacks.setdefault(event.stack, event.stack)
        return msgspec.structs.replace(record, event=msgspec.structs.replace(event, stack=stack))


def load(folder: Path) -> Run:
    """Read a run folder as a whole. What it contains never raises; a folder that is none gives an empty run."""
    reader = Reader(folder)
    records = tuple(reader.records)
    return Run(folder, reader.job, records, reader.missing, reader.completeness)


def runs_in(root: Path) -> list[Path]:
    """Return the run folders within `root`, newest first; [] if it cannot be read."""
    try:
        found = [path for path in root.iterdir() if is_run(path)]
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)
    except OSError:
        return []


def is_run(folder: Path) -> bool:
    """Whether a folder looks like a run's."""
    try:
        return (folder / RECORDS).is_dir() or (folder / JOB_FILE).is_file()
    except OSError:
        return False


# -- files -------------------------------------------------------------------------------------


def _job(folder: Path, missing: list[Missing]) -> Job | None:
    try:
        return read_job(folder)
    except FileNotFoundError:
        missing.append(Missing(JOB_FILE, "not there"))
    except (OSError, DecodeError) as error:
        missing.append(Missing(JOB_FILE, _words(error)))
    return None


def _listed(folder: Path, missing: list[Missing]) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".jsonl")
    except FileNotFoundError:
        missing.append(Missing(RECORDS, "not there"))
    except OSError as error:
        missing.append(Missing(RECORDS, _words(error)))
    return []


def _read(path: Path, missing: list[Missing]) -> tuple[list[Record], int]:
    """The records of a file, and how many of its lines are none; a last line that is torn does not count."""
    name = f"{RECORDS}/{path.name}"
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        missing.append(Missing(name, _words(error)))
        return [], 1
    is_whole = not lines[-1]
    found: list[Record] = []
    bad = 0
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = from_line(line)
        except DecodeError as error:
            if number == len(lines) and not is_whole:
                missing.append(Missing(name, "the last line is torn", number))
                continue
            bad += 1
            if bad <= NOTED:
                missing.append(Missing(name, f"not a record: {_words(error)}", number))
            continue
        if record.schema > SCHEMA:
            missing.append(
                Missing(name, f"schema {record.schema} is newer than {SCHEMA}, read as far as known", number)
            )
        found.append(record)
    if bad > NOTED:
        missing.append(Missing(name, f"{bad - NOTED} more lines are not records"))
    return found, bad


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    return str(error)[:120]


# -- what is not there -------------------------------------------------------------------------


def _completeness(
    names: Sequence[str], damaged: Mapping[str, int], seen: Set[int], absent: Sequence[int]
) -> Completeness:
    """names: of all record files. damaged: records that are missing, by name. seen, absent: ranks."""
    by_node: defaultdict[str, set[int]] = defaultdict(set)
    for name in names:
        node, _, rank = name.rpartition("-")
        if rank.isdecimal():
            by_node[node].add(int(rank))
    ranks = set(absent)
    for name in damaged:
        node, _, rank = name.rpartition("-")
        ranks |= {int(rank)} if rank.isdecimal() else by_node[node]
    known = ranks.union(seen, *by_node.values())
    return Completeness(len(known), tuple(sorted(ranks)), tuple(sorted(damaged)), sum(damaged.values()))


def _note_gaps(name: str, records: Iterable[Record], missing: list[Missing]) -> int:
    """Each process numbers its records, a rank anew in each call: what is not there shows. Answers how many."""
    numbers: defaultdict[tuple[str, int, int], set[int]] = defaultdict(set)
    told = 0
    for record in records:
        origin = record.origin
        numbers[origin.role, origin.pid, origin.call if origin.role == "rank" else 0].add(record.sequence)
        if isinstance(record.event, events.TelemetryDropped) and record.event.signal == "record":
            told += record.event.count
    lost = sum(max(seen) + 1 - len(seen) for seen in numbers.values())
    if lost:
        also = f", {told} of them reported as dropped" if told else ""
        missing.append(Missing(name, f"{lost} record{'s' if lost != 1 else ''} missing by their numbers{also}"))
    return lost
