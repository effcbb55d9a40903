"""What happened, in one timeline?  The lines of all files of a run, in order of time.

A merge over one forward reader per file (`run_folder.lines`): memory grows with the number of files, not with their
length, and no file stays open. The order within a file is kept; the order between files of two nodes is as exact as
their clocks (`history.clocks`). `LineFilter` selects lines."""

from __future__ import annotations

import contextlib
import fnmatch
import heapq
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from resilience.attribution.incident import Incident
from resilience.attribution.notes import NOTES
from resilience.errors import DecodeError
from resilience.facts import events
from resilience.facts.identity import owner_of
from resilience.facts.records import Record, from_line
from resilience.history.clocks import NodeClock, errors_of, largest_difference_ns, offsets_of
from resilience.history.history import History
from resilience.run_folder.clocks import clocks
from resilience.run_folder.lines import AHEAD_NS, LEVELS, FileLines, Kind, KnownFile, Line
from resilience.run_folder.load import RECORDS
from resilience.system.files import ROTATED

LOGS, OUTPUT = "logs", "output"
BUFFERS = 48 << 20  # bytes of all file buffers together
LEAST_CHUNK, MOST_CHUNK = 4 << 10, 256 << 10
AROUND_NS = 5 * 10**9  # margin before and after an incident


class LineFilter(msgspec.Struct, frozen=True):
    """Which lines to select; None: all. event: a shell pattern for tags of records and messages of log lines.
    since_ns, until_ns: UTC. kinds: kinds of files."""

    ranks: frozenset[int] | None = None
    level: str | None = None
    event: str | None = None
    iteration: int | None = None
    cycle: int | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    kinds: frozenset[Kind] | None = None


class MergedLines:
    """The lines of a run folder in order. Iterate once; `bad` and `unreadable` are final afterwards.

    choice: the lines to select. clocks: the clocks to correct; None: as the run's barriers show; (): none."""

    def __init__(
        self, folder: Path, choice: LineFilter | None = None, clocks: tuple[NodeClock, ...] | None = None
    ) -> None:
        self.folder = folder
        self.choice = LineFilter() if choice is None else choice
        self._is_wanted = _test(self.choice)
        self._sources: dict[str, FileLines] = {}
        files = list(_files(folder))
        self._starts = _WorkerStarts()
        self._starts.read(files)
        self.clocks: tuple[NodeClock, ...] = clocks_of(folder) if clocks is None else clocks
        self._offsets = offsets_of(self.clocks)
        self._add(files)

    @property
    def bad(self) -> dict[str, int]:
        """Return the number of lines, by file, that are neither a record nor a log line."""
        return {name: source.bad for name, source in self._sources.items() if source.bad}

    @property
    def unreadable(self) -> dict[str, str]:
        return {name: source.error for name, source in self._sources.items() if source.error}

    def last_times(self) -> list[int]:
        """Return the time of each file's last line that has one, UTC, without reading the files from the beginning."""
        return [at for source in self._sources.values() if (at := source.last_time()) is not None]

    def __iter__(self) -> Iterator[Line]:
        return self._merged(is_final=True)

    def follow(self, wait: Callable[[], bool]) -> Iterator[Line | None]:
        """Yield the existing lines, then new ones; None after each batch. wait: called after None; False ends the loop.

        Lines are ordered within a batch. An incomplete line waits for its newline, or for the end."""
        while True:
            yield from self._merged(is_final=False)
            yield None
            if not wait():
                break
            files = list(_files(self.folder))
            self._place(files)
            self._add([entry for entry in files if self._is_new(entry[0])])
        yield from self._merged(is_final=True)

    def _merged(self, is_final: bool) -> Iterator[Line]:
        heap: list[tuple[int, int, Line, FileLines]] = []
        for number, source in enumerate(self._sources.values()):
            line = source.next(is_final)
            if line is not None:
                heap.append((source.key, number, line, source))
        heapq.heapify(heap)
        # Lines within the window may follow a later one, if a clock was set back or a line begins with a time ahead.
        is_wanted, until = self._is_wanted, self.choice.until_ns
        while heap:
            key, number, line, source = heap[0]
            if until is not None and key > until + AHEAD_NS:
                return
            if is_wanted(line):
                yield line
            following = source.next(is_final)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (source.key, number, following, source))

    def _add(self, files: list[tuple[Path, Kind]]) -> None:
        wanted = [(path, kind) for path, kind in files if self._may_hold(path, kind)]
        count = max(1, len(self._sources) + len(wanted))
        chunk = min(max(BUFFERS // count, LEAST_CHUNK), MOST_CHUNK)
        for path, kind in wanted:
            name = _name(self.folder, path)
            self._sources[name] = FileLines(path, self._known(path, kind, name), chunk)

    def _is_new(self, path: Path) -> bool:
        """Return True for a new file. A rotated file is read to its end under its old name."""
        name = _name(self.folder, path)
        return name not in self._sources and name.removesuffix(ROTATED) not in self._sources

    def _may_hold(self, path: Path, kind: Kind) -> bool:
        """Return False if the name of a file shows that it has no selected lines."""
        rank = _rank_of(path, kind)
        choice = self.choice
        if choice.kinds is not None and kind not in choice.kinds:
            return False
        if kind == "text" and choice.cycle is not None and path.parent.name != str(choice.cycle):
            return False
        return choice.ranks is None or (rank is not None and rank in choice.ranks)

    def _known(self, path: Path, kind: Kind, name: str) -> KnownFile:
        rank = _rank_of(path, kind)
        if kind != "text":
            node = owner_of(path.stem).node
            return KnownFile(name, kind, rank, node, None, self._offsets.get(node, 0))
        cycle = int(path.parent.name) if path.parent.name.isdecimal() else None
        started = None if rank is None else self._starts.known.get((cycle or 0, rank))
        if started is None:
            return KnownFile(name, kind, rank, None, cycle)
        began, node = started
        offset = self._offsets.get(node, 0)
        return KnownFile(name, kind, rank, node, cycle, offset, began - offset)

    def _place(self, files: list[tuple[Path, Kind]]) -> None:
        """Find out which worker writes each output that is new, or was there before its agent recorded the start."""
        unplaced = [source for source in self._sources.values() if source.is_unplaced]
        if unplaced or any(kind == "text" and self._is_new(path) for path, kind in files):
            self._starts.read(files)
        for source in unplaced:
            name = source.known.name
            source.known = self._known(self.folder / name, "text", name)


class _WorkerStarts:
    """When and where each worker was started: its output does not name the node, and may have no times.

    known: cycle and rank -> UTC nanoseconds by the node's own clock, and node."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], tuple[int, str]] = {}
        self._read: dict[Path, int] = {}  # complete lines of each agent's file that were read, in bytes

    def read(self, files: Iterable[tuple[Path, Kind]]) -> None:
        """Add what the agents among the owners of these files have recorded since the last call."""
        for path, kind in files:
            if kind == "record" and owner_of(path.stem).is_agent:
                with contextlib.suppress(OSError):
                    self._read_one(path)

    def _read_one(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            for line in file:
                if line.endswith(b"\n"):
                    self._read[path] = self._read.get(path, 0) + len(line)
                if b'"worker.started"' in line:
                    with contextlib.suppress(DecodeError):  # the timeline shows the line unchanged
                        self._take(from_line(line), owner_of(path.stem).node)

    def _take(self, record: Record, node: str) -> None:
        if isinstance(record.event, events.WorkerStarted):
            self.known[record.origin.cycle, record.event.worker_rank] = (record.wall_ns, node)


def last_ns(folder: Path) -> int:
    """Return the time of a run's last line, UTC, by corrected clocks; without any, the time of the newest file.

    The time of a file is only the fallback, because a copy of a run has new files with old lines."""
    times = MergedLines(folder).last_times()
    return max(times, default=0) or max((_changed(path) for path, _ in _files(folder)), default=0)


def clocks_of(*folders: Path) -> tuple[NodeClock, ...]:
    """Return the clocks of a run's nodes; () for a single node. folders: of the run; each node may have its own."""
    by_node: defaultdict[str, list[Path]] = defaultdict(list)
    for path in (path for folder in folders for path in files_of(folder, RECORDS)):
        by_node[owner_of(path.stem).node].append(path)
    return clocks(by_node)


def records_of(folder: Path) -> Iterator[Record]:
    """Yield all readable records of a run, file by file, one in memory at a time."""
    for path, kind in _files(folder):
        if kind == "record":
            yield from records_in(path)


def uncertainty_of(folder: Path) -> float | None:
    """Return by how many seconds the clocks of two nodes may differ; None for one node, or if one is unknown."""
    largest = largest_difference_ns(clocks_of(folder))
    return None if largest is None else largest / 1e9


def history_of(
    folder: Path, records: Iterable[Record] | None = None, clocks: Iterable[NodeClock] | None = None
) -> History:
    """Return the history of a run, in memory that does not grow with its record files. records: default: all. clocks:
    default: as the run's barriers show."""
    known = clocks_of(folder) if clocks is None else tuple(clocks)
    history = History(offsets_of(known), NOTES, clock_errors=errors_of(known))
    return history.take_all(records_of(folder) if records is None else records)


def window(incident: Incident) -> tuple[int, int] | None:
    """Return begin and end (UTC ns) of an incident, with a margin; None if its time is unknown."""
    begin, detected = incident.since_wall_ns, incident.detected_wall_ns
    if begin is None or detected is None:
        return None
    restart_ns = round((incident.restart.max_s if incident.restart is not None else 0.0) * 1e9)
    return begin - AROUND_NS, detected + restart_ns + AROUND_NS


def records_in(path: Path) -> Iterator[Record]:
    """Yield the readable records of one file."""
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    yield from_line(line)
                except DecodeError:
                    continue  # the timeline shows the line unchanged
    except OSError:
        return


# -- files -------------------------------------------------------------------------------------


def files_of(folder: Path, name: str, suffix: str = ".jsonl") -> list[Path]:
    """Return the files of one kind in a run folder, sorted by name; [] if there are none."""
    return [path for path in _listed(folder / name) if path.suffix == suffix and path.is_file()]


def _files(folder: Path) -> Iterator[tuple[Path, Kind]]:
    """Yield all files of a run that contain lines, sorted by name."""
    kinds: tuple[tuple[str, Kind], ...] = ((RECORDS, "record"), (LOGS, "log"))
    for name, kind in kinds:
        yield from ((path, kind) for path in _listed(folder / name) if path.suffix == ".jsonl")
    for below in _listed(folder / OUTPUT):
        texts = [path for path in _listed(below) if path.name.removesuffix(ROTATED).endswith((".out", ".err"))]
        yield from ((path, "text") for path in sorted(texts, key=_oldest_first))


def _oldest_first(path: Path) -> tuple[str, bool]:
    return path.name.removesuffix(ROTATED), not path.name.endswith(ROTATED)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _name(folder: Path, path: Path) -> str:
    return str(path.relative_to(folder))


def _rank_of(path: Path, kind: Kind) -> int | None:
    if kind == "text":
        rank = path.name.partition(".")[0]
        return int(rank) if rank.isdecimal() else None
    return owner_of(path.stem).rank


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


# -- choosing ----------------------------------------------------------------------------------


def _test(choice: LineFilter) -> Callable[[Line], bool]:
    """Return a function that tests a line. It checks only the given criteria."""
    tests: list[Callable[[Line], bool]] = []
    if (ranks := choice.ranks) is not None:
        tests.append(lambda line: line.rank in ranks)
    if choice.level is not None:
        wanted = frozenset(LEVELS[LEVELS.index(choice.level) :])
        tests.append(lambda line: line.level in wanted)
    if choice.event is not None:
        matches = re.compile(fnmatch.translate(choice.event)).match
        tests.append(lambda line: line.kind in ("record", "log") and matches(line.event) is not None)
    if (iteration := choice.iteration) is not None:
        tests.append(lambda line: line.iteration == iteration)
    if (cycle := choice.cycle) is not None:
        tests.append(lambda line: line.cycle == cycle)
    if (since := choice.since_ns) is not None:
        tests.append(lambda line: line.at_ns >= since)
    if (until := choice.until_ns) is not None:
        tests.append(lambda line: line.at_ns <= until)
    return lambda line: all(test(line) for test in tests)
