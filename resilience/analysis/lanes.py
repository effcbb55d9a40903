"""What did each rank do over time?  Iterations or cycles, the phases between them, and what went wrong.

Ranks with the same story (the same iterations, each with the same end, and no fault of their own) share a lane, which
is drawn as its first rank was; so a job of 10,000 ranks has as many lanes as it has stories. Whose fault it was is
the incidents' verdict. Times are UTC nanoseconds, clocks' offsets taken off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from resilience.attribution.incident import Incident
from resilience.core.attribution import InterruptionRecord
from resilience.history.history import History
from resilience.history.phases import Place, TimedPhase
from resilience.history.ranks import WORKER, Stretch

MOST_LANES = 64
MOST_MARKS = 200  # of one rank


class Shown(msgspec.Struct, frozen=True):
    """A stretch of time, with its label. kind: how it ended, or that a section was open."""

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
    silent: tuple[Shown, ...] = ()


class Lane(msgspec.Struct, frozen=True):
    """One or more ranks with the same story. phases: of the first one's restarts."""

    ranks: tuple[int, ...]
    stretches: tuple[Shown, ...]
    marks: tuple[Mark, ...]
    phases: tuple[TimedPhase, ...] = ()


class Drawn(msgspec.Struct, frozen=True):
    """The lanes of a run, by their first rank. left_out: ranks whose stories are too many to be drawn."""

    lanes: tuple[Lane, ...]
    left_out: tuple[int, ...] = ()


def lanes(history: History, incidents: Sequence[Incident]) -> Drawn:
    """Return the lanes; at most 64, those of ranks with faults of their own first of all."""
    return _Lanes(history, incidents).drawn()


class _Lanes:
    def __init__(self, history: History, incidents: Sequence[Incident]) -> None:
        self._history = history
        self._blamed = {(incident.place, rank) for incident in incidents for rank in _blamed(incident)}
        self._marks: defaultdict[int, list[tuple[Place, InterruptionRecord]]] = defaultdict(list)
        for place, record in _interruptions(history):
            if len(self._marks[record.rank]) < MOST_MARKS:
                self._marks[record.rank].append((place, record))

    def drawn(self) -> Drawn:
        groups: defaultdict[object, list[int]] = defaultdict(list)
        for rank in sorted({*self._history.ranks.ranks, *self._marks}):
            own = tuple(place for place, _ in self._marks.get(rank, ()) if self._is_own(place, rank))
            groups[tuple((done.place, done.kind) for done in self._shown(rank)), own].append(rank)
        ordered = sorted(groups.items(), key=lambda group: (not group[0][1], -len(group[1])))  # type: ignore[index]
        phases = self._phases({members[0] for _, members in ordered[:MOST_LANES]})
        found = [self._lane(members, phases[members[0]]) for _, members in ordered[:MOST_LANES]]
        left_out = sorted(rank for _, members in ordered[MOST_LANES:] for rank in members)
        return Drawn(tuple(sorted(found, key=lambda lane: lane.ranks[0])), tuple(left_out))

    def _shown(self, rank: int) -> list[Stretch]:
        """What a lane shows: iterations, which lie within the lives of workers, or these."""
        stretches = list(self._history.ranks.stretches(rank, self._history.last_ns or 0))
        return [each for each in stretches if each.place[3] != WORKER] or stretches

    def _phases(self, ranks: set[int]) -> dict[int, list[TimedPhase]]:
        """The phases of some ranks, those of their nodes with them."""
        found: dict[int, list[TimedPhase]] = {rank: [] for rank in ranks}
        on_node: defaultdict[str, list[int]] = defaultdict(list)
        for rank, node in self._history.cycles.node_of().items():
            if rank in ranks:
                on_node[node].append(rank)
        for phase in self._history.phases(ranks):
            for rank in [phase.who] if isinstance(phase.who, int) else on_node[phase.who]:
                found[rank].append(phase)
        return found

    def _lane(self, members: list[int], phases: list[TimedPhase]) -> Lane:
        followed: dict[Place, list[InterruptionRecord]] = {}
        marks = []
        for rank in members:
            for place, record in self._marks.get(rank, ()):
                if not self._is_own(place, rank):
                    followed.setdefault(place, []).append(record)
                elif rank == members[0]:
                    marks.append(_mark(record, len(members), True))
        for records in followed.values():
            ranks = len({record.rank for record in records})
            marks.append(_mark(min(records, key=lambda record: record.detected_wall_ns or 0), ranks, False))
        return Lane(
            tuple(members),
            tuple(Shown(each.begin_ns, each.end_ns, each.kind, _label(each.place)) for each in self._shown(members[0])),
            tuple(sorted(marks, key=lambda mark: mark.at_ns)),
            tuple(sorted(phases, key=lambda phase: phase.start_ns)),
        )

    def _is_own(self, place: Place, rank: int) -> bool:
        return (place, rank) in self._blamed or (place[:2], rank) in self._blamed


def _interruptions(history: History) -> Iterator[tuple[Place, InterruptionRecord]]:
    """All interruptions on record, each in its iteration or cycle."""
    for place, iteration in sorted(history.iterations.items()):
        yield from ((place, record) for record in iteration.records)
    for cycle in history.cycles.places:
        for part in history.cycles.parts(cycle).values():
            yield from (((*cycle, WORKER, WORKER), seen.record) for seen in part.seen)


def _mark(record: InterruptionRecord, ranks: int, is_own: bool) -> Mark:
    at = record.detected_wall_ns or 0
    return Mark(at, _said(record), ranks, is_own, tuple(_silent(record, at)) if is_own or ranks == 1 else ())


def _blamed(incident: Incident) -> set[int]:
    first = incident.verdict.first
    return {culprit.rank for culprit in incident.verdict.culprits} | (set() if first is None else {first})


def _label(place: Place) -> str:
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


def _silent(seen: InterruptionRecord, at: int) -> list[Shown]:
    """Sections that were open when it was noticed, and the silence before."""
    found = []
    for section in seen.open_sections:
        limit = "" if section.limit_s is None else f", allowed are {section.limit_s:g} s"
        label = f"section {section.name} open for {section.open_s:.3g} s{limit}"
        found.append(Shown(at - round(section.open_s * 1e9), at, "section", label))
    if seen.silent_for_s and not found:
        label = f"no sign of life for {seen.silent_for_s:.3g} s"
        found.append(Shown(at - round(seen.silent_for_s * 1e9), at, "section", label))
    return found
