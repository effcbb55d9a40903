"""What does a run folder contain?  Everything that can be read, and a list of what cannot.

A run folder may be incomplete, end in the middle of a line, lack some of its files, or be partly unreadable. The reader
takes what exists and notes the rest with file and line. It does not interpret records; `attribution.incidents` and
`report.condensed` do."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

import msgspec

from resilience.attribution.advice import named
from resilience.errors import ConfigurationError, DecodeError
from resilience.facts import events
from resilience.facts.identity import FileOwner, Job, Origin, owner_of
from resilience.facts.in_words import count
from resilience.facts.records import SCHEMA, Record, from_line, from_lines
from resilience.history.completeness import Completeness
from resilience.telemetry.durations import UNREADABLE
from resilience.telemetry.recording import JOB_FILE, read_job

RECORDS = "records"
TIMINGS = "timings"
NOTED = 20  # unreadable lines noted individually per file; the others are counted
_Place = tuple[str, int, int, int, int]
"""Role, process id, attempt, cycle and call."""
_Numbering = tuple[_Place, int]
"""A place, and how many processes have numbered their records from 0 there before: a replaced container has the same
process ids."""


class Missing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that is missing or could not be parsed. line: from 1."""

    file: str
    what: str
    line: int | None = None


class Run(msgspec.Struct, frozen=True):
    """The readable part of a run folder. records: by file, in the order of each file."""

    folder: Path
    job: Job | None
    records: tuple[Record, ...]
    missing: tuple[Missing, ...]
    completeness: Completeness = Completeness()


class Reader:
    """Reads a run folder once, file by file. Memory holds the records of one file, not of the run.

    records: iterate once; `missing` and `completeness` are final afterwards. No content of the folder raises."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._missing: list[Missing] = []
        self.job = _job(folder, self._missing)
        self.completeness = Completeness()

    @property
    def missing(self) -> tuple[Missing, ...]:
        """What could not be read so far."""
        return tuple(self._missing)

    @property
    def records(self) -> Iterator[Record]:
        """Yield all records, by file, in the order of each file."""
        known = _Known()
        missing_before = len(self._missing)
        paths = _listed(self.folder / RECORDS, self._missing)
        unlisted = [] if paths else unlisted_in(self.folder, RECORDS)
        damaged = {folder.file: 0 for folder in unlisted}  # it is not known how many
        if not paths and len(self._missing) == missing_before == 0:
            self._missing.append(Missing(RECORDS, "contains no record files"))
        for path in paths:
            file_records, lost = _read(path, self._missing)
            numbers, reported = known.take(file_records)
            yield from file_records
            # A damaged line is also missing in the sequence.
            lost = max(lost, _note_gaps(f"{RECORDS}/{path.name}", numbers, reported, self._missing))
            if lost:
                damaged[path.stem] = lost
        absent = known.absent
        if absent:  # these ranks must have existed, but left no records
            self._missing.append(Missing(RECORDS, f"no records of {named(absent)}"))
        for node in sorted(known.launched - known.agents):  # its agent started these monitors
            agent = FileOwner(node, is_agent=True).name
            if agent not in damaged:
                damaged[agent] = 0  # it is not known how many
                self._missing.append(Missing(RECORDS, f"no records of the agent of {node}"))
        self.completeness = _completeness([path.stem for path in paths], damaged, known.ranks, absent)


class _Known:
    """What the records say about which records exist. ranks: with records. launched: nodes whose workers an agent
    started. agents: nodes whose agent left records."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.launched: set[str] = set()
        self.agents: set[str] = set()
        self._size = 0  # of the world: of the largest call, or cycle in which workers ran
        self._workers: set[int] = set()

    @property
    def absent(self) -> list[int]:
        """The ranks that must have existed, but left no records."""
        return sorted(self._workers.union(range(self._size)) - self.ranks)

    def take(self, records: Sequence[Record]) -> tuple[Mapping[_Numbering, list[int]], Mapping[_Numbering, int]]:
        """Take the records of one file. Return the sequence numbers and the reported losses, by numbering."""
        numbers: defaultdict[_Numbering, list[int]] = defaultdict(list)
        dropped: Counter[_Numbering] = Counter()
        ended: dict[_Numbering, int] = {}  # losses that a monitor states at its end
        met = 0  # ranks at the last rendezvous
        before: Counter[_Place] = Counter()  # processes that ended
        origin: Origin | None = None  # of the record before: mostly the same one, and comparing it is fast
        for record in records:  # millions of them in a large run
            if record.origin != origin:
                origin = record.origin
                place = _place(origin)
                numbering = (place, before[place])
                add = numbers[numbering].append
                self._take_origin(origin)
            if record.sequence == 0 and _is_another_process(numbers[numbering]):
                before[place] += 1
                numbering = (place, before[place])
                add = numbers[numbering].append
            add(record.sequence)
            event = record.event
            if type(event) not in _COUNTED:
                continue
            match event:
                case events.CallStarted():
                    self._size = max(self._size, event.world_size)
                case events.RendezvousCompleted():
                    met = event.world_size
                case events.CyclePhaseStarted(phase="run"):
                    self._size = max(self._size, met)  # all nodes have their workers, also one without any records
                case events.WorkerStarted():
                    self._workers.add(event.worker_rank)
                case events.TelemetryDropped(signal="record"):
                    dropped[numbering] += event.count
                case events.MonitorEnded():
                    ended[numbering] = event.dropped_records
                case _:  # no other event matters here
                    pass
        return numbers, dropped | Counter(ended)  # the larger one: both count the same losses

    def _take_origin(self, origin: Origin) -> None:
        if origin.initial_rank is not None:
            self.ranks.add(origin.initial_rank)
        if origin.role == "agent":
            self.agents.add(origin.node)
        elif origin.is_launchers:
            self.launched.add(origin.node)


_COUNTED = frozenset(
    (
        events.CallStarted,
        events.RendezvousCompleted,
        events.CyclePhaseStarted,
        events.WorkerStarted,
        events.TelemetryDropped,
        events.MonitorEnded,
    )
)


def completeness_of(folder: Path) -> Completeness:
    """Return which records of a run are missing. Reads all of them, one file in memory at a time."""
    reader = Reader(folder)
    for _ in reader.records:
        pass  # the reader counts
    return reader.completeness


def load(folder: Path) -> Run:
    """Read a whole run folder. No content raises; a folder that is not a run gives an empty run."""
    reader = Reader(folder)
    records = tuple(reader.records)
    return Run(folder, reader.job, records, reader.missing, reader.completeness)


def runs_in(root: Path) -> list[Path]:
    """Return the run folders within `root`, newest first; [] if it is no folder.

    Raises: ConfigurationError if it cannot be read."""
    try:
        runs = [path for path in root.iterdir() if is_run(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigurationError(f"{root} {reason_in_words(error)}") from error
    times = {path: at for path in runs if (at := _created_ns(path)) is not None}
    return sorted(times, key=lambda path: (times[path], path.name), reverse=True)


def unlisted_in(folder: Path, *names: str) -> list[Missing]:
    """Return which of these folders of a run exist but cannot be listed, and why."""
    unlisted: list[Missing] = []
    for name in names:
        try:
            os.listdir(folder / name)
        except FileNotFoundError:
            continue  # nothing has been written there
        except OSError as error:
            unlisted.append(Missing(name, reason_in_words(error)))
    return unlisted


def incomplete_in_words(completeness: Completeness) -> str:
    """Return which records and timings are missing; "" if none are known to be missing."""
    parts = [_missing_records(completeness), unread_timings_in_words(completeness)]
    return "" if completeness.is_whole else f"incomplete: {'; '.join(filter(None, parts))}"


def _missing_records(completeness: Completeness) -> str:
    if completeness.has_all_records:
        return ""
    ranks = f" of {named(completeness.damaged)}" if completeness.damaged else ""
    owners = [owner_of(name) for name in completeness.files]
    if owners and all(owner.is_agent for owner in owners):
        nodes = [owner.node for owner in owners]
        ranks = f" of the agent{'s' if len(nodes) > 1 else ''} of {', '.join(nodes)}"
    lost = f", at least {count(completeness.lost, 'record')}" if completeness.lost else ""
    return f"records{ranks} are missing{lost}"


def unread_timings_in_words(completeness: Completeness) -> str:
    """Return which timings cannot be read; "" if none are known. Sections, steps per second and what-ifs lack them."""
    names = completeness.timings
    if not names:
        return ""
    if TIMINGS in names:
        return "timings cannot be read"
    ranks = {
        owner.rank for name in names if (owner := owner_of(Path(name.removesuffix(UNREADABLE)).stem)).rank is not None
    }
    of_ranks = f" of {named(ranks)}" if ranks else ""
    return f"{count(len(names), 'file')} of timings{of_ranks} cannot be read"


def is_run(folder: Path) -> bool:
    """Return True if a folder looks like a run folder."""
    try:
        return (folder / RECORDS).is_dir() or (folder / JOB_FILE).is_file()
    except OSError:
        return False


def _created_ns(path: Path) -> int | None:
    """Return when a run was created, UTC; without its job.json, when its folder was changed. A page that is written
    into a folder later does not make it the newest. None if it cannot be found, for instance because it was just
    deleted."""
    for created in (path / JOB_FILE, path):
        with contextlib.suppress(OSError):
            return created.stat().st_mtime_ns
    return None


# -- files -------------------------------------------------------------------------------------


def _job(folder: Path, missing: list[Missing]) -> Job | None:
    try:
        return read_job(folder)
    except FileNotFoundError:
        missing.append(Missing(JOB_FILE, "does not exist"))
    except (OSError, DecodeError) as error:
        missing.append(Missing(JOB_FILE, reason_in_words(error)))
    return None


def _listed(folder: Path, missing: list[Missing]) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".jsonl")
    except FileNotFoundError:
        missing.append(Missing(RECORDS, "does not exist"))
    except OSError as error:
        missing.append(Missing(RECORDS, reason_in_words(error)))
    return []


def _read(path: Path, missing: list[Missing]) -> tuple[list[Record], int]:
    """Return the records of a file, and the number of other lines. A torn last line does not count."""
    name = f"{RECORDS}/{path.name}"
    try:
        content = path.read_bytes()
    except OSError as error:
        missing.append(Missing(name, reason_in_words(error)))
        return [], 1
    with contextlib.suppress(DecodeError):  # on an error, decode line by line to find the bad ones
        all_records = from_lines(content)
        is_one_a_line = len(all_records) == content.count(b"\n") + (not content.endswith(b"\n"))
        if is_one_a_line and all(record.schema <= SCHEMA for record in all_records):
            return all_records, 0
    lines = content.split(b"\n")
    is_whole = not lines[-1]
    records: list[Record] = []
    bad, newer = 0, list[int]()  # numbers of lines
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
                missing.append(Missing(name, f"not a record: {reason_in_words(error)}", number))
            continue
        if record.schema > SCHEMA:
            newer.append(number)
        records.append(record)
    if bad > NOTED:
        missing.append(Missing(name, f"not records: {count(bad - NOTED, 'more line')}"))
    if newer:
        what = f"{count(len(newer), 'record')} of a newer schema than {SCHEMA}; only known fields were read"
        missing.append(Missing(name, what, newer[0]))
    return records, bad


def reason_in_words(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    return str(error)[:120]


# -- what is not there -------------------------------------------------------------------------


def _completeness(
    names: Sequence[str], damaged: Mapping[str, int], on_record: Set[int], absent: Sequence[int]
) -> Completeness:
    """Summarise completeness. names: record files. damaged: missing records by file, 0 if unknown.
    on_record, absent: ranks."""
    by_node: defaultdict[str, set[int]] = defaultdict(set)
    for name in names:
        owner = owner_of(name)
        if owner.rank is not None:
            by_node[owner.node].add(owner.rank)
    ranks = set(absent)
    for name in damaged:
        owner = owner_of(name)
        ranks |= by_node[owner.node] if owner.rank is None else {owner.rank}
    known = ranks.union(on_record, *by_node.values())
    return Completeness(len(known), tuple(sorted(ranks)), tuple(sorted(damaged)), sum(damaged.values()))


def _place(origin: Origin) -> _Place:
    """Return what numbers its records by itself: an agent; a monitor in each cycle; a rank in each call."""
    cycle = 0 if origin.role == "agent" else origin.cycle
    return origin.role, origin.pid, origin.attempt, cycle, origin.call if origin.role == "rank" else 0


def _is_another_process(numbers: Sequence[int]) -> bool:
    """Return True if a record with number 0 after these is of another process with the same id. Two threads of one
    process may write its first two records in the other order."""
    return 0 in numbers or len(numbers) > 1


def _note_gaps(
    name: str, numbers: Mapping[_Numbering, Sequence[int]], dropped: Mapping[_Numbering, int], missing: list[Missing]
) -> int:
    """Note the gaps in a file's sequence numbers; return how many records are missing.

    dropped: records reported as dropped. A loss after the last record leaves no gap."""
    gaps = {numbering: max(sequence) + 1 - len(set(sequence)) for numbering, sequence in numbers.items()}
    lost = sum(max(gap, dropped.get(numbering, 0)) for numbering, gap in gaps.items())
    if lost:
        reported = sum(dropped.values())
        dropped_note = f", {reported} of them reported as dropped" if reported else ""
        missing.append(Missing(name, f"{lost} record{'s' if lost != 1 else ''} missing in the sequence{dropped_note}"))
    return lost
