"""What does the first look at a record file read?  Its beginning and its end, because a large job has long files."""

from __future__ import annotations

import os
from pathlib import Path

from resilience.facts import events
from resilience.facts.records import Record, beginnings
from resilience.telemetry.recording import READ_AT_ONCE, RecordTail

HEAD = 2 << 10  # bytes of a file's beginning, which describes the call
TAIL = 12 << 10  # bytes of its end that are read first; more if they do not show the current activity
MORE = 8  # factor by which TAIL grows
_UNSHOWN = beginnings(
    events.StageStarted,
    events.StageEnded,
    events.AbortCut,
    events.InterruptDelivered,
    events.FirstStepReported,
    events.RestartEnded,
    events.RestartStep,
)
"""Most records are of these kinds. None of them is in `state._SHOWN`, which lists what changes the state shown here."""
_TELLING = frozenset((events.IterationStarted, events.MonitorStarted, events.CycleStarted))
"""Events after which a file shows what its rank or agent does."""


def opened(path: Path | str) -> tuple[RecordTail, list[Record]]:
    """Return a reader of a file's new records, and its records so far: the first and the last ones."""
    try:
        size = os.stat(path).st_size
    except OSError:
        size = 0
    last = TAIL
    while HEAD + last < min(size, READ_AT_ONCE):
        tail = RecordTail(path, last=last, first=HEAD, without=_UNSHOWN)
        records = tail.added(size)
        if any(type(record.event) in _TELLING for record in records):
            return tail, [*tail.beginning, *records]
        last *= MORE
    tail = RecordTail(path, last=READ_AT_ONCE if size > READ_AT_ONCE else None, without=_UNSHOWN)
    return tail, tail.added(size)
