"""What did each rank do over time?  Iterations or cycles, the phases between them, and interruptions.

Ranks with the same history (the same iterations with the same ends, and no fault of their own) share a lane, drawn from
its first rank. So a job of 10,000 ranks has few lanes. The incidents' verdicts decide which rank is to blame. Times are
UTC nanoseconds, corrected by the clocks' offsets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from resilience.attribution.incident import Incident
from resilience.facts.in_words import seconds
from resilience.facts.interruptions import InterruptionRecord
from resilience.history.cycles import Cycle
from resilience.history.history import History
from resilience.history.phases import Place, TimedPhase
from resilience.history.ranks import WORKER, Stretch

MOST_LANES = 64
MOST_MARKS = 200  # per rank


class LaneStretch(msgspec.Struct, frozen=True):
    """A stretch of time with a label. kind: how it ended, or `section` for an open section."""

    begin_ns: int
    end_ns: int
    kind: str
    label: str


class Mark(msgspec.Struct, frozen=True):
    """A recorded interruption. ranks: number of ranks of the lane with this mark. is_own: the verdict blames the rank.

    silent: stretches without a sign of life, or with an open section, before the mark."""

    at_ns: int
    label: str
    ranks: int = 1
    is_own: bool = True
    silent: tuple[LaneStretch, ...] = ()


class Lane(msgspec.Struct, frozen=True):
    """One or more ranks with the same history. phases: phases of the first rank's restarts."""

    ranks: tuple[int, ...]
    stretches: tuple[LaneStretch, ...]
    marks: tuple[Mark, ...]
    phases: tuple[TimedPhase, ...] = ()


class LaneChart(msgspec.Struct, frozen=True):
    """The lanes of a run, by their first rank. left_out: ranks beyond MOST_LANES lanes."""

    lanes: tuple[Lane, ...]
    left_out: tuple[int, ...] = ()


def lanes(history: History, incidents: Sequence[Incident]) -> LaneChart:
    """Return at most MOST_LANES lanes. Ranks with their own faults take precedence."""
    return _Lanes(history, incidents).drawn()


class _Lanes:
    def __init__(self, history: History, incidents: Sequence[Incident]) -> None:
        self._history = history
        self._blamed = {(incident.place, rank) for incident in incidents for rank in _blamed(incident)}
        self._lost = {rank for rank, last in history.last_calls().items() if last.outcome is None and last.is_lost}
        self._judged = {incident.place for incident in incidents if incident.layer == "launcher" and _blamed(incident)}
        self._stopped_in: dict[Cycle, set[int]] = {}
        self._marks: defaultdict[int, list[tuple[Place, InterruptionRecord]]] = defaultdict(list)
        for place, record in _interruptions(history):
            if len(self._marks[record.rank]) < MOST_MARKS:
                self._marks[record.rank].append((place, record))

    def drawn(self) -> LaneChart:
        groups: defaultdict[object, list[int]] = defaultdict(list)
        for rank in sorted({*self._history.ranks.ranks, *self._marks}):
            own_faults = tuple(place for place, _ in self._marks.get(rank, ()) if self._is_own(place, rank))
            groups[tuple((done.place, done.kind) for done in self._shown(rank)), own_faults].append(rank)
        ordered = sorted(groups.items(), key=lambda group: (not group[0][1], -len(group[1])))  # type: ignore[index]
        phases = self._phases({members[0] for _, members in ordered[:MOST_LANES]})
        drawn = [self._lane(members, phases[members[0]]) for _, members in ordered[:MOST_LANES]]
        left_out = sorted(rank for _, members in ordered[MOST_LANES:] for rank in members)
        return LaneChart(tuple(sorted(drawn, key=lambda lane: lane.ranks[0])), tuple(left_out))

    def _shown(self, rank: int) -> list[Stretch]:
        """Return the iterations of a rank; without any, its worker lifetimes."""
        stretches = list(self._history.ranks.stretches(rank, self._history.last_ns or 0))
        if rank in self._lost:  # its end is on record, but no agent or Wrapper was left to record that of its work
            stretches = [self._ended(stretch, rank) if stretch.kind == "open" else stretch for stretch in stretches]
        stretches = [stretch for stretch in stretches if stretch.place[3] != WORKER] or stretches
        return [msgspec.structs.replace(stretch, kind=self._kind(stretch, rank)) for stretch in stretches]

    def _ended(self, stretch: Stretch, rank: int) -> Stretch:
        """Return the open stretch of a lost rank, up to where its time ends."""
        lost_ns = self._history.lost_at(rank, stretch.place[:2])
        end_ns = stretch.end_ns if lost_ns is None else max(stretch.begin_ns, lost_ns)
        return msgspec.structs.replace(stretch, kind="lost", end_ns=end_ns)

    def _kind(self, stretch: Stretch, rank: int) -> str:
        """Return how a stretch ended, in agreement with the verdict and with what the launcher did: which worker ended
        first says little, and the monitor of a worker that was stopped sees only that it is gone."""
        cycle = stretch.place[:2]
        if stretch.kind == "lost" and rank in self._stopped(cycle):
            return "interrupted"
        if stretch.place[3] == WORKER and cycle in self._judged and stretch.kind in ("failed", "interrupted"):
            return "failed" if self._is_own(stretch.place, rank) else "interrupted"
        return stretch.kind

    def _stopped(self, cycle: Cycle) -> set[int]:
        """Return the ranks that the launcher stopped on purpose."""
        if cycle not in self._stopped_in:
            parts = self._history.cycles.parts(cycle) if cycle in self._history.cycles.places else {}
            self._stopped_in[cycle] = {rank for part in parts.values() for rank in part.stopped}
        return self._stopped_in[cycle]

    def _phases(self, ranks: set[int]) -> dict[int, list[TimedPhase]]:
        """Return the phases of some ranks, including those of their nodes."""
        by_rank: dict[int, list[TimedPhase]] = {rank: [] for rank in ranks}
        on_node: defaultdict[str, list[int]] = defaultdict(list)
        for rank, node in self._history.cycles.node_of().items():
            if rank in ranks:
                on_node[node].append(rank)
        for phase in self._history.phases(ranks):
            for rank in [phase.who] if isinstance(phase.who, int) else on_node[phase.who]:
                by_rank[rank].append(phase)
        return by_rank

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
            tuple(
                LaneStretch(stretch.begin_ns, stretch.end_ns, stretch.kind, _label(stretch.place))
                for stretch in self._shown(members[0])
            ),
            tuple(sorted(marks, key=lambda mark: mark.at_ns)),
            tuple(sorted(phases, key=lambda phase: phase.start_ns)),
        )

    def _is_own(self, place: Place, rank: int) -> bool:
        return (place, rank) in self._blamed or (place[:2], rank) in self._blamed


def _interruptions(history: History) -> Iterator[tuple[Place, InterruptionRecord]]:
    """Yield all recorded interruptions, each with its iteration or cycle."""
    for place, iteration in sorted(history.iterations.items()):
        yield from ((place, record) for record in iteration.records)
    for cycle in history.cycles.places:
        for part in history.cycles.parts(cycle).values():
            yield from (((*cycle, WORKER, WORKER), sighting.record) for sighting in part.seen)


def _mark(record: InterruptionRecord, ranks: int, is_own: bool) -> Mark:
    at = record.detected_wall_ns or 0
    return Mark(
        at, _in_words(record), ranks, is_own, tuple(_silent_stretches(record, at)) if is_own or ranks == 1 else ()
    )


def _blamed(incident: Incident) -> set[int]:
    """Return the ranks that the verdict blames. A rank that only reported first is none of them, nor is one that was
    lost with its node or agent."""
    is_own = incident.verdict.what not in ("node_lost", "agent_lost")
    return {culprit.rank for culprit in incident.verdict.culprits} if is_own else set()


def _label(place: Place) -> str:
    attempt, cycle, call, iteration = place
    parts = [f"iteration {iteration}"] if iteration >= 0 else []
    parts += [f"call {call}"] if call > 0 else []
    parts += [f"cycle {cycle}"] if cycle or iteration < 0 else []
    return " of ".join([*parts, *([f"attempt {attempt}"] if attempt else [])])


def _in_words(record: InterruptionRecord) -> str:
    if record.exception is not None:
        return record.exception.in_words[:200]
    if record.exit is not None and (record.exit.signal or record.exit.code is not None):
        what = "its program ended" if record.program_had_failed else "its process ended"
        return f"{what}: {record.exit.signal or f'exit code {record.exit.code}'}"
    return record.message[:200] or record.interruption.value


def _silent_stretches(record: InterruptionRecord, detected_ns: int) -> list[LaneStretch]:
    """Return the sections that were open at detection; without any, the silence before it."""
    stretches = []
    for section in record.open_sections:
        limit = "" if section.limit_s is None else f", limit {seconds(section.limit_s)}"
        label = f"section {section.name} open for {seconds(section.open_s)}{limit}"
        stretches.append(LaneStretch(detected_ns - round(section.open_s * 1e9), detected_ns, "section", label))
    if record.silent_for_s and not stretches:
        label = f"no sign of life for {seconds(record.silent_for_s)}"
        stretches.append(LaneStretch(detected_ns - round(record.silent_for_s * 1e9), detected_ns, "section", label))
    return stretches
