"""What did each rank do over time?  Iterations or cycles, the phases between them, and what went wrong.

Ranks with the same story (the same iterations, each with the same end, and no fault of their own) share a lane, which
is drawn as its first rank was; so a job of 10,000 ranks has as many lanes as it has stories. Whose fault it was is
the incidents' verdict. Times are UTC nanoseconds, clocks' offsets taken off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from resilience.analysis.legs import Legs
from resilience.analysis.waterfall import Leg
from resilience.attribution.incident import Incident
from resilience.core import events
from resilience.core.attribution import InterruptionRecord
from resilience.core.records import Record

MOST_LANES = 64
MOST_MARKS = 200  # of one rank
_Place = tuple[int, int, int, int]


class Stretch(msgspec.Struct, frozen=True):
    """A rank's iteration, or its worker's life. kind: how it ended: completed, interrupted, failed, lost, open."""

    begin_ns: int
    end_ns: int
    kind: str
    label: str


class Mark(msgspec.Struct, frozen=True):
    """An interruption on record. ranks: of the lane, which have one there. is_own: the verdict blames the rank.

    silent: since when there was no sign of life, or a section was open, and what it was."""

    at_ns: int
    label: str
    ranks: int = 1
    is_own: bool = True
    silent: tuple[Stretch, ...] = ()


class Lane(msgspec.Struct, frozen=True):
    """One or more ranks with the same story. legs: phases of the first one's restarts."""

    ranks: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    marks: tuple[Mark, ...]
    legs: tuple[Leg, ...] = ()


class Drawn(msgspec.Struct, frozen=True):
    """The lanes of a run, by their first rank. left_out: ranks whose stories are too many to be drawn."""

    lanes: tuple[Lane, ...]
    left_out: tuple[int, ...] = ()


class _Rank:
    """What one rank did. A stretch is begin, end, kind and place, for there are many."""

    __slots__ = ("marks", "open", "stretches", "workers")

    def __init__(self) -> None:
        self.open: dict[_Place, int] = {}
        self.stretches: list[tuple[int, int, str, _Place]] = []
        self.workers: list[tuple[int, int, str, _Place]] = []
        self.marks: list[tuple[_Place, InterruptionRecord, int]] = []

    def end(self, place: _Place, at: int, kind: str) -> None:
        begun = self.open.pop(place, None)
        if begun is not None:
            (self.workers if place[3] < 0 else self.stretches).append((begun, at, kind, place))


class Lanes:
    """Takes the records of a run in the order of each file."""

    def __init__(self, offsets: Mapping[str, int] | None = None) -> None:
        """offsets: how far each node's clock is ahead, in nanoseconds."""
        self._offsets = {} if offsets is None else offsets
        self._ranks: defaultdict[int, _Rank] = defaultdict(_Rank)
        self._places: dict[_Place, _Place] = {}
        self._last = 0
        self.legs = Legs(offsets)

    def take(self, record: Record) -> None:
        """Add what a record says."""
        self.legs.take(record)
        event, origin = record.event, record.origin
        at = record.wall_ns - self._offsets.get(origin.node, 0)
        self._last = max(self._last, at)
        rank = origin.initial_rank
        match event:
            case events.IterationStarted() if rank is not None:
                self._ranks[rank].open.setdefault(self._place(record), at)
            case events.IterationEnded() if rank is not None:
                self._ranks[rank].end(self._place(record), at, event.outcome)
            case events.WorkerStarted():
                self._ranks[event.worker_rank].open.setdefault(self._worker(record), at)
            case events.WorkerExited():
                kind = "failed" if not event.expected else "completed" if event.code == 0 else "interrupted"
                self._ranks[event.worker_rank].end(self._worker(record), at, kind)
            case events.Interrupted(seen):
                of = self._ranks[seen.rank]
                if len(of.marks) < MOST_MARKS:
                    place = self._worker(record) if origin.is_launchers else self._place(record)
                    if seen.iteration is not None:
                        place = (*place[:3], seen.iteration)
                    when = (seen.detected_wall_ns or record.wall_ns) - self._offsets.get(origin.node, 0)
                    of.marks.append((place, seen, when))

    def drawn(self, incidents: Sequence[Incident]) -> Drawn:
        """Return the lanes; at most 64, those of ranks with faults of their own first of all."""
        blamed = {(_key(incident), rank) for incident in incidents for rank in _blamed(incident)}
        groups: defaultdict[object, list[int]] = defaultdict(list)
        for rank, known in sorted(self._ranks.items()):
            for place in list(known.open):
                known.end(place, self._last, "open")
            own = tuple(place for place, _, _ in known.marks if _is_own(blamed, place, rank))
            shown = known.stretches or known.workers  # iterations lie within the lives of workers
            groups[tuple((place, kind) for _, _, kind, place in shown), own].append(rank)
        told = sorted(groups.items(), key=lambda group: (not group[0][1], -len(group[1])))  # type: ignore[index]
        legs = self.legs.within({members[0] for _, members in told[:MOST_LANES]})
        made = [self._lane(members, blamed, legs[members[0]]) for _, members in told[:MOST_LANES]]
        left_out = sorted(rank for _, members in told[MOST_LANES:] for rank in members)
        return Drawn(tuple(sorted(made, key=lambda lane: lane.ranks[0])), tuple(left_out))

    def _lane(self, members: list[int], blamed: set[tuple[object, int]], legs: list[Leg]) -> Lane:
        known = self._ranks[members[0]]
        stretches = sorted(known.stretches or known.workers)
        followed: dict[_Place, list[tuple[InterruptionRecord, int]]] = {}
        marks = []
        for rank in members:
            for place, seen, at in self._ranks[rank].marks:
                if _is_own(blamed, place, rank):
                    if rank == members[0]:
                        marks.append(Mark(at, _said(seen), len(members), silent=tuple(_silent(seen, at))))
                else:
                    followed.setdefault(place, []).append((seen, at))
        for of in followed.values():
            ranks = len({seen.rank for seen, _ in of})
            seen, at = min(of, key=lambda one: one[1])
            marks.append(Mark(at, _said(seen), ranks, False, tuple(_silent(seen, at)) if ranks == 1 else ()))
        return Lane(
            tuple(members),
            tuple(Stretch(begin, end, kind, _label(place)) for begin, end, kind, place in stretches),
            tuple(sorted(marks, key=lambda mark: mark.at_ns)),
            tuple(sorted(legs, key=lambda leg: leg.start_ns)),
        )

    def _place(self, record: Record) -> _Place:
        origin = record.origin
        place = (origin.attempt, origin.cycle, origin.call, origin.iteration or 0)
        return self._places.setdefault(place, place)

    def _worker(self, record: Record) -> _Place:
        place = (record.origin.attempt, record.origin.cycle, -1, -1)
        return self._places.setdefault(place, place)


def _key(incident: Incident) -> object:
    """Where an incident's interruptions are on record."""
    if incident.layer == "launcher":
        return incident.attempt, incident.cycle
    return incident.attempt, incident.cycle, incident.call, incident.iteration


def _blamed(incident: Incident) -> set[int]:
    first = incident.verdict.first
    return {culprit.rank for culprit in incident.verdict.culprits} | (set() if first is None else {first})


def _is_own(blamed: set[tuple[object, int]], place: _Place, rank: int) -> bool:
    return (place, rank) in blamed or (place[:2], rank) in blamed


def _label(place: _Place) -> str:
    attempt, cycle, call, iteration = place
    parts = [f"iteration {iteration}"] if iteration >= 0 else []
    parts += [f"call {call}"] if call > 0 else []
    parts += [f"cycle {cycle}"] if cycle or iteration < 0 else []
    return " of ".join([*parts, *([f"attempt {attempt}"] if attempt else [])])


def _said(seen: InterruptionRecord) -> str:
    if seen.exception is not None:
        return f"{seen.exception.type}: {seen.exception.message}"[:200]
    if seen.exit is not None and (seen.exit.signal or seen.exit.code is not None):
        return f"its process ended: {seen.exit.signal or f'exit code {seen.exit.code}'}"
    return seen.message[:200] or seen.interruption.value


def _silent(seen: InterruptionRecord, at: int) -> list[Stretch]:
    """Sections that were open when it was noticed, and the silence before."""
    found = []
    for section in seen.open_sections:
        limit = "" if section.limit_s is None else f", allowed are {section.limit_s:g} s"
        label = f"section {section.name} open for {section.open_s:.3g} s{limit}"
        found.append(Stretch(at - round(section.open_s * 1e9), at, "section", label))
    if seen.silent_for_s and not found:
        label = f"no sign of life for {seen.silent_for_s:.3g} s"
        found.append(Stretch(at - round(seen.silent_for_s * 1e9), at, "section", label))
    return found
