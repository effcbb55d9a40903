"""What did each rank do over time?  Stretches of iterations and cycles, and where they were interrupted.

Ranks whose lanes look alike are one lane, so that a job of 10,000 ranks has as many lanes as it has stories.
Times are wall nanoseconds of the records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from resilience.core import events
from resilience.core.records import Record

RESOLUTION = 400  # places along a lane: lanes that agree in all of them look alike
MOST_LANES = 64


class Stretch(msgspec.Struct, frozen=True):
    """A rank's iteration, or its worker's life. kind: how it ended: completed, interrupted, failed, lost, open."""

    begin_ns: int
    end_ns: int
    kind: str
    label: str


class Mark(msgspec.Struct, frozen=True):
    """An interruption of the rank itself."""

    at_ns: int
    label: str


class Lane(msgspec.Struct, frozen=True):
    """One or more ranks with the same story."""

    ranks: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    marks: tuple[Mark, ...]


class _Rank:
    def __init__(self) -> None:
        self.open: dict[tuple[str, int], tuple[int, str]] = {}
        self.stretches: list[Stretch] = []
        self.marks: list[Mark] = []

    def begin(self, what: tuple[str, int], at: int, label: str) -> None:
        self.open.setdefault(what, (at, label))

    def end(self, what: tuple[str, int], at: int, kind: str) -> None:
        begun = self.open.pop(what, None)
        if begun is not None:
            self.stretches.append(Stretch(begun[0], at, kind, begun[1]))


def lanes(records: Iterable[Record]) -> list[Lane]:
    """Return the lanes of a run, by their first rank; at most 64, the ones with interruptions first of all."""
    ranks: dict[int, _Rank] = defaultdict(_Rank)
    first, last = None, 0
    for record in sorted(records, key=lambda record: record.wall_ns):
        first = record.wall_ns if first is None else first
        last = max(last, record.wall_ns)
        _take(record, ranks)
    for known in ranks.values():
        for what in list(known.open):
            known.end(what, last, "open")
        if any("iteration" in stretch.label for stretch in known.stretches):  # within the lives of workers
            known.stretches = [stretch for stretch in known.stretches if "iteration" in stretch.label]
        known.stretches.sort(key=lambda stretch: stretch.begin_ns)
    return _grouped(ranks, first or 0, last)


def _take(record: Record, ranks: dict[int, _Rank]) -> None:
    event, origin, at = record.event, record.origin, record.wall_ns
    rank = origin.initial_rank
    match event:
        case events.WorkerStarted():
            ranks[event.worker_rank].begin(("worker", origin.cycle), at, f"cycle {origin.cycle}")
        case events.WorkerExited():
            kind = "completed" if event.code == 0 else "interrupted" if event.expected else "failed"
            ranks[event.worker_rank].end(("worker", origin.cycle), at, kind)
        case events.IterationStarted() if rank is not None:
            label = f"iteration {origin.iteration}" + (f" of cycle {origin.cycle}" if origin.cycle else "")
            ranks[rank].begin(("iteration", origin.iteration or 0), at, label)
        case events.IterationEnded() if rank is not None:
            ranks[rank].end(("iteration", origin.iteration or 0), at, event.outcome)
        case events.Interrupted(interruption):
            where = interruption.rank if rank is None else rank
            what = interruption.message
            if interruption.exception is not None:
                what = f"{interruption.exception.type}: {interruption.exception.message}"
            ranks[where].marks.append(Mark(interruption.detected_wall_ns or at, what[:200]))


def _grouped(ranks: dict[int, _Rank], first: int, last: int) -> list[Lane]:
    span = max(1, last - first)

    def place(at: int) -> int:
        return round((at - first) / span * RESOLUTION)

    groups: dict[object, list[int]] = defaultdict(list)
    for rank, known in sorted(ranks.items()):
        story = (
            tuple((place(each.begin_ns), place(each.end_ns), each.kind) for each in known.stretches),
            tuple((place(mark.at_ns), mark.label) for mark in known.marks),
        )
        groups[story].append(rank)
    made = [
        Lane(tuple(members), tuple(ranks[members[0]].stretches), tuple(ranks[members[0]].marks))
        for members in groups.values()
    ]
    told = sorted(made, key=lambda lane: (not lane.marks, -len(lane.ranks)))[:MOST_LANES]
    return sorted(told, key=lambda lane: lane.ranks[0])
