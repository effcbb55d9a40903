"""Which rank failed first?  Asked right after a restart, by the process that tells a person at the terminal.

The answer is that of the report: the newest records of all ranks are folded into an incident. They are read from the
run folder once the restart is over, in a thread of their own, so neither a restart nor a rank waits for them. Only the
end of each file is read, and in a large job only the files that changed last, and those of the ranks that they name as
the first. If no incident is found in time, the caller says what it knows itself."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from resilience.attribution.incident import Incident
from resilience.core import events
from resilience.core.records import Record
from resilience.telemetry.recording import RecordTail

FIRST_LOOK = 0.3  # seconds after the restart: processors are busy with it until then
LOOK_EVERY = 0.2
LIMIT = 2.0  # seconds until records of all ranks should be there; those of other nodes may not be
FINISH_LIMIT = 0.5  # seconds for a line that is to be said at once
LAST_BYTES = 64 << 10  # of each file: a restart leaves a few KB
MOST_FILES = 512

Wanted = Callable[[Record], bool]
Complete = Callable[[list[Record]], bool]
Choose = Callable[[tuple[Incident, ...]], Incident | None]


class Line:
    """A line that is made and said in a thread of its own."""

    def __init__(self, make: Callable[[threading.Event], str], say: Callable[[str], object]) -> None:
        """make: gets what is set once there is no more time to wait for records."""
        self._hurry = threading.Event()
        self._thread = threading.Thread(
            target=lambda: say(make(self._hurry)), name="resilience-restart-line", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Have the line said now, because the process is about to leave its terminal. Waits a moment for it."""
        self._hurry.set()
        self._thread.join(FINISH_LIMIT)


def incident(
    folder: Path, wanted: Wanted, complete: Complete, choose: Choose, hurry: threading.Event
) -> Incident | None:
    """Return the incident that `choose` takes of those that the `wanted` records tell; None if there is none in time.

    complete: return True if nothing more is to be expected. hurry: set once what is on record has to be enough. Blocks
    as long as the disk does: to be called in a thread of its own."""
    from resilience.attribution.incidents import fold  # only a process that says something loads it

    hurry.wait(FIRST_LOOK)
    deadline = time.monotonic() + LIMIT
    tails: dict[Path, RecordTail] = {}
    records: dict[Path, list[Record]] = {}

    def read(paths: Iterable[Path]) -> None:
        for path in paths:
            tail = tails.setdefault(path, RecordTail(path, LAST_BYTES))
            records.setdefault(path, []).extend(filter(wanted, tail.added()))

    while True:
        is_last = hurry.is_set() or time.monotonic() >= deadline
        files = _newest_first(folder / "records")
        read(files[:MOST_FILES])
        read(_of_the_first(files[MOST_FILES:], records.values()))
        known = [record for path in sorted(records) for record in records[path]]
        if is_last or complete(known):
            found = choose(fold(known))
            is_partial = len(files) > len(records)
            # Of a part of the records, that no rank is blamed says nothing.
            return None if found is not None and is_partial and not found.verdict.culprits else found
        hurry.wait(LOOK_EVERY)


def _newest_first(folder: Path) -> list[Path]:
    """Return the record files, the one that changed last first."""
    try:
        with os.scandir(folder) as entries:
            files = [(entry.stat().st_mtime, entry.path) for entry in entries if entry.name.endswith(".jsonl")]
    except OSError:
        return []
    return [Path(path) for _, path in sorted(files, reverse=True)]


def _of_the_first(files: Iterable[Path], known: Iterable[Iterable[Record]]) -> list[Path]:
    """Return the files of the ranks whose record the store has first, as the other ranks say, and of workers that
    failed, as their agents say."""
    ranks: set[str] = set()
    for record in itertools.chain.from_iterable(known):
        match record.event:
            case events.OutcomeSeen(by=int(rank)):
                ranks.add(str(rank))
            case events.WorkerExited(worker_rank=rank, expected=False) | events.OthersSeen(rank=rank):
                ranks.add(str(rank))
    return [path for path in files if path.stem.rpartition("-")[2] in ranks]
