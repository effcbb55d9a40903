"""Which rank failed first?  The process that prints the line of a restart asks this right after the restart.

The answer is the report's: the newest records of all ranks are folded into an incident. A separate thread reads them
from the run folder after the restart, so neither a restart nor a rank waits for it. It reads only the end of each file;
in a large job it reads only the files that changed last, and those of the ranks that they name as first. If these blame
no rank, it also reads the files of the ranks that were elsewhere than most. Barriers in these records show how far the
nodes' clocks are apart. If no incident is found in time, the caller prints what it knows itself."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from resilience.attribution.incident import Incident
from resilience.errors import error_in_words
from resilience.facts import events
from resilience.facts.identity import owner_of
from resilience.facts.records import Record
from resilience.history.clocks import BarrierMark, compared, errors_of, marks_of, meetings_of, offsets_of
from resilience.history.completeness import Completeness
from resilience.telemetry.recording import RecordTail

FIRST_LOOK = 0.3  # seconds after the restart, which keeps processors busy until then
LOOK_EVERY = 0.2
LIMIT = 2.0  # seconds after the restart to wait for all ranks' records; those of other nodes may never arrive
FINISH_LIMIT = 0.5  # seconds for a line that must be printed immediately
LAST_BYTES = 64 << 10  # read from each file of a large job; a restart leaves a few KB
ALL_BYTES = 4 << 20  # read from the files of a small job together: it may restart 50 times a second
MOST_FILES = 512
MOST_MARKS = 32  # of barriers in one file: 512 nodes with so many are compared in 0.2 s

_STACK = re.compile(rb'"event":"iteration\.decided"[^\n]*?"stack":(\[[^\]\n]*\])')

Wanted = Callable[[Record], bool]
Complete = Callable[[list[Record]], bool]
Choose = Callable[[tuple[Incident, ...]], Incident | None]


class Hurry(threading.Event):
    """Set when there is no time left to wait for records. is_behind: the job has restarted again meanwhile."""

    is_behind = False


Make = Callable[[Hurry], str]
Emit = Callable[[events.Event], object]


class RestartLine:
    """Lines that a separate thread computes and prints, one after the other. emit: records that one cannot be made."""

    def __init__(self, make: Make, say: Callable[[str], object], emit: Emit) -> None:
        self._hurry = Hurry()
        self._emit = emit
        self._say = say
        self._make: Make | None = make
        self._following: Make | None = None
        self._is_over = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._print_all, name="resilience-restart-line", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # this host or process has no thread left: the line is not printed
            self._is_over = True

    def follow(self, make: Make) -> bool:
        """Print another line after the present one. Return False if it is already printed: then make a new one.

        If the job restarts faster than lines are made, only the line of the newest restart follows."""
        with self._lock:
            if not self._is_over:
                self._following = make
                self._hurry.is_behind = True
            return not self._is_over

    def finish(self) -> None:
        """Print the line now, because the process is about to exit. Wait briefly for it."""
        self._hurry.set()
        if self._thread.ident is not None:
            self._thread.join(FINISH_LIMIT)

    def _print_all(self) -> None:
        while self._make is not None:
            try:
                self._say(self._make(self._hurry))
            except Exception as error:  # the edge to the analysis: a later restart has a line all the same
                self._emit(events.AnalysisFailed(error_in_words(error)))
            with self._lock:
                self._make, self._following = self._following, None
                self._hurry.is_behind = False
                self._is_over = self._make is None


def incident(
    folder: Path, wanted: Wanted, complete: Complete, choose: Choose, hurry: threading.Event
) -> Incident | None:
    """Return the incident that `choose` selects from those in the `wanted` records; None if there is none in time.

    complete: returns True if no more records are expected. hurry: set when the present records must be enough. Blocks
    as long as the disk does, so call it in a separate thread."""
    deadline = time.monotonic() + LIMIT
    hurry.wait(FIRST_LOOK)
    files_read = _Files(wanted)
    while True:
        is_last = hurry.is_set() or time.monotonic() >= deadline
        files = _newest_first(folder / "records")
        files_read.read(files[:MOST_FILES])
        files_read.read(_files_of_first(files[MOST_FILES:], files_read.records.values()))
        if is_last or complete(files_read.present()):
            chosen = choose(files_read.incidents(len(files)))
            if chosen is None or chosen.verdict.culprits or len(files) == len(files_read.records):
                return chosen
            if not hurry.is_set():
                files_read.read(_files_of_odd([path for path in files if path not in files_read.records]))
                chosen = choose(files_read.incidents(len(files)))
            # With only part of the records, a verdict without a culprit says nothing.
            return chosen if chosen is not None and chosen.verdict.culprits else None
        hurry.wait(min(LOOK_EVERY, max(0.0, deadline - time.monotonic())))


class _Files:
    """The ends of record files, read again as they grow. records: the wanted ones of each file."""

    def __init__(self, wanted: Wanted) -> None:
        self.records: dict[Path, list[Record]] = {}
        self._marks: dict[Path, list[BarrierMark]] = {}  # of all records: a barrier is often beside the wanted ones
        self._tails: dict[Path, RecordTail] = {}
        self._wanted = wanted

    def read(self, paths: Iterable[Path]) -> None:
        paths = list(paths)
        last_bytes = max(LAST_BYTES, ALL_BYTES // max(1, len(paths)))
        for path in paths:
            added = self._tails.setdefault(path, RecordTail(path, last_bytes)).added()
            self._marks[path] = [*self._marks.get(path, ()), *marks_of(added)][-MOST_MARKS:]
            self.records.setdefault(path, []).extend(filter(self._wanted, added))

    def present(self) -> list[Record]:
        return [record for path in sorted(self.records) for record in self.records[path]]

    def incidents(self, number: int) -> tuple[Incident, ...]:
        """Return the incidents in these records, with times of one clock, as far as the barriers in them show it.
        number: of all files."""
        from resilience.attribution.incidents import fold  # loaded only by a process that prints such a line

        nodes = sorted({mark.node for marks in self._marks.values() for mark in marks})
        clocks = compared(nodes, meetings_of(self._marks.values())) if len(nodes) > 1 else ()
        completeness = Completeness(is_sample=number > len(self.records))
        return fold(self.present(), offsets_of(clocks), errors_of(clocks), completeness)


def _newest_first(folder: Path) -> list[Path]:
    """Return the record files, last changed first."""
    try:
        with os.scandir(folder) as entries:
            files = [(entry.stat().st_mtime, entry.path) for entry in entries if entry.name.endswith(".jsonl")]
    except OSError:
        return []
    return [Path(path) for _, path in sorted(files, reverse=True)]


def _files_of_first(files: Iterable[Path], records: Iterable[Iterable[Record]]) -> list[Path]:
    """Return the files of ranks whose record was first in the store, according to other ranks, and of failed workers,
    according to their agents."""
    ranks: set[int] = set()
    for record in itertools.chain.from_iterable(records):
        match record.event:
            case events.IterationDecided(by=int(rank)):
                ranks.add(rank)
            case events.WorkerExited(worker_rank=rank, expected=False) | events.OthersSeen(rank=rank):
                ranks.add(rank)
            case _:  # no other event matters here
                pass
    return [path for path in files if owner_of(path.stem).rank in ranks]


def _files_of_odd(files: Iterable[Path]) -> list[Path]:
    """Return the files of ranks that were elsewhere than most when they learned of the interruption, the fewer the
    earlier. Only the text of the last stack is compared: that takes a fraction of a second for 10,000 files."""
    groups: defaultdict[bytes, list[Path]] = defaultdict(list)
    for path in files:
        groups[_last_stack(path)].append(path)
    by_size = sorted(groups.values(), key=len)
    return list(itertools.chain.from_iterable(by_size[:-1]))[:MOST_FILES]


def _last_stack(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            stacks = _STACK.findall(file.read())
    except OSError:
        return b""
    return stacks[-1] if stacks else b""
