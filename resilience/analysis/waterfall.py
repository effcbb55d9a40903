"""Where did the time of one restart go, and whom did all the others wait for?

Legs are the phases of every rank (or, of the launcher, of every node) as they are on record. The critical
path is walked backwards from whoever was back last: within a rank leg by leg; where all meet, over to
the one who came last, for whom the others waited. Its steps add up to the whole restart."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from resilience.analysis.merge import clocks_of, records_of
from resilience.attribution.incident import Incident
from resilience.core import events
from resilience.core.records import Record
from resilience.history.cycles import LEGS

MEETINGS = frozenset(("regroup", "rendezvous"))  # phases that end for all when the last one has come
NOTICE = "notice"  # from the first detection until this rank or node knew of it
Who = int | str
"""An initial rank, or a node of the launcher."""


class Leg(msgspec.Struct, frozen=True):
    """One phase of one rank or node, UTC nanoseconds."""

    name: str
    who: Who
    node: str
    start_ns: int
    end_ns: int


class Step(msgspec.Struct, frozen=True):
    """A stretch of the critical path. Meetings have the one who came last in a step before them."""

    name: str
    who: Who
    start_ns: int
    seconds: float


class Row(msgspec.Struct, frozen=True):
    """One phase over all ranks or nodes; seconds from the restart's start. half_s: when half had ended it."""

    name: str
    start_s: float
    half_s: float
    end_s: float
    median_s: float
    max_s: float
    slowest: Who
    count: int


class Waterfall(msgspec.Struct, frozen=True):
    """One restart. path: from the first detection to the last one's first progress.

    uncertainty_s: how far the clocks of two nodes may differ; None where one node has all, or nothing is known.
    trace_id: where a trace viewer has it."""

    incident: int
    layer: str
    kind: str
    start_ns: int
    seconds: float
    rows: tuple[Row, ...]
    path: tuple[Step, ...]
    uncertainty_s: float | None = None
    trace_id: str = ""

    @property
    def longest(self) -> Step | None:
        """Where most of the time went."""
        return max(self.path, key=lambda step: step.seconds, default=None)


def waterfall(folder: Path, incident: Incident) -> Waterfall | None:
    """Return how the restart of an incident went; None if nothing of it is on record."""
    clocks = clocks_of(folder)
    offsets = {clock.node: clock.offset_ns for clock in clocks}
    known = [clock.uncertainty_ns for clock in clocks if clock.uncertainty_ns]
    legs = [
        msgspec.structs.replace(
            leg, start_ns=leg.start_ns - offsets.get(leg.node, 0), end_ns=leg.end_ns - offsets.get(leg.node, 0)
        )
        for leg in legs_of(records_of(folder), incident)
    ]
    found = from_legs(legs, incident)
    if found is None or not known:
        return found
    return msgspec.structs.replace(found, uncertainty_s=max(known) / 1e9)


def legs_of(records: Iterable[Record], incident: Incident) -> Iterator[Leg]:
    """Yield the legs of a restart, from all records of a run, in any order of files."""
    return _launched(records, incident) if incident.layer == "launcher" else _in_process(records, incident)


def _in_process(records: Iterable[Record], incident: Incident) -> Iterator[Leg]:
    """Phases between the start of a rank's restart in the incident's iteration and its end, wherever that is."""
    place = (incident.attempt, incident.cycle, incident.call)
    restarting: set[int] = set()
    for record in records:
        origin, event = record.origin, record.event
        rank = origin.initial_rank
        if rank is None or origin.is_launchers or (origin.attempt, origin.cycle, origin.call) != place:
            continue
        match event:
            case events.StageStarted(stage="restart"):
                if origin.iteration == incident.iteration:
                    restarting.add(rank)
            case events.StageEnded(stage="restart"):
                restarting.discard(rank)
            case events.StageEnded(stage=stage) if stage in events.PHASES and rank in restarting:
                end = record.wall_ns - round(event.ended_ago_s * 1e9)
                yield Leg(stage, rank, origin.node, end - round(event.duration_s * 1e9), end)


def _launched(records: Iterable[Record], incident: Incident) -> Iterator[Leg]:
    """A node's way from the failure of one cycle to the next one's first progress.

    A worker's first progress is its first sign to the launcher's monitor, or that its wrapped function is entered."""
    before, this = incident.cycle, incident.cycle + 1
    started: dict[int, Record] = {}
    entered: dict[int, Record] = {}
    progressed: set[int] = set()
    for record in records:
        origin, event = record.origin, record.event
        if origin.attempt != incident.attempt or origin.cycle not in (before, this):
            continue
        match event:
            case events.WorkerStarted(worker_rank=rank) if origin.cycle == this:
                started.setdefault(rank, record)
            case events.StageStarted(stage="run") if origin.cycle == this and origin.initial_rank is not None:
                entered.setdefault(origin.initial_rank, record)
            case events.CyclePhaseEnded(phase="run") if origin.cycle == before:
                if incident.detected_wall_ns is not None and incident.detected_wall_ns < record.wall_ns:
                    yield Leg("detect", origin.node, origin.node, incident.detected_wall_ns, record.wall_ns)
            case events.CyclePhaseEnded(phase="stop", duration_s=took) if origin.cycle == before:
                yield _ended(record, "stop", origin.node, took)
            case events.CyclePhaseEnded(phase="gate" | "rendezvous" | "spawn" as phase, duration_s=took):
                if origin.cycle == this:
                    yield _ended(record, phase, origin.node, took)
            case events.WorkerProgressed(after_s=took) if origin.cycle == this and origin.initial_rank is not None:
                end = record.wall_ns - round(event.ago_s * 1e9)
                progressed.add(origin.initial_rank)
                yield Leg("import", origin.initial_rank, origin.node, end - round(took * 1e9), end)
    for rank in sorted((started.keys() & entered.keys()) - progressed):
        yield _ended(entered[rank], "import", rank, (entered[rank].mono_ns - started[rank].mono_ns) / 1e9)


def _ended(record: Record, name: str, who: Who, seconds: float) -> Leg:
    return Leg(name, who, record.origin.node, record.wall_ns - round(seconds * 1e9), record.wall_ns)


# -- from legs to a picture --------------------------------------------------------------------


def from_legs(legs: list[Leg], incident: Incident) -> Waterfall | None:
    """Return how a restart went that consists of these legs; None if there are none."""
    if not legs:
        return None
    start = min(leg.start_ns for leg in legs)
    if incident.layer == "inprocess" and incident.detected_wall_ns is not None and len({leg.node for leg in legs}) == 1:
        start = min(start, incident.detected_wall_ns)  # a dead rank has no legs of its own
    end = max(leg.end_ns for leg in legs)
    return Waterfall(
        incident.number,
        incident.layer,
        incident.kind,
        start,
        (end - start) / 1e9,
        tuple(_rows(legs, start, LEGS if incident.layer == "launcher" else events.PHASES)),
        tuple(critical_path(legs, start)),
    )


def _rows(legs: list[Leg], start: int, names: Iterable[str]) -> Iterator[Row]:
    for name in sorted(names, key=lambda name: min((leg.start_ns for leg in legs if leg.name == name), default=0)):
        of = [leg for leg in legs if leg.name == name]
        if of:
            took = {leg.who: (leg.end_ns - leg.start_ns) / 1e9 for leg in of}
            slowest = max(took, key=lambda who: took[who])
            ends = sorted(leg.end_ns for leg in of)
            yield Row(
                name,
                (min(leg.start_ns for leg in of) - start) / 1e9,
                (ends[(len(ends) - 1) // 2] - start) / 1e9,
                (ends[-1] - start) / 1e9,
                statistics.median(took.values()),
                took[slowest],
                slowest,
                len(of),
            )


def critical_path(legs: Iterable[Leg], start_ns: int) -> list[Step]:
    """Return the steps from `start_ns` to the end of the last leg; they add up to the whole.

    Time between two legs of a rank belongs to the earlier one: nothing is left out."""
    by_who: dict[Who, list[Leg]] = {}
    arrivals: dict[str, list[Leg]] = {}
    for one in sorted(legs, key=lambda leg: (leg.start_ns, leg.end_ns)):
        by_who.setdefault(one.who, []).append(one)
        arrivals.setdefault(one.name, []).append(one)
    leg = max((found for of in by_who.values() for found in of), key=lambda leg: leg.end_ns)
    at = leg.end_ns
    steps: list[Step] = []
    visited: set[Leg] = set()
    while at > start_ns:
        visited.add(leg)
        begin, last = _came_last(leg, arrivals) if leg.name in MEETINGS else (leg.start_ns, leg)
        begin = min(at, max(start_ns, begin))
        steps.append(Step(leg.name, leg.who, begin, (at - begin) / 1e9))
        at = begin
        before = _before(by_who, last, at)
        if before is None or before in visited:
            steps.append(Step(NOTICE, last.who, start_ns, (at - start_ns) / 1e9))
            break
        leg = before
    return _joined([step for step in reversed(steps) if step.seconds])


def _came_last(leg: Leg, arrivals: Mapping[str, list[Leg]]) -> tuple[int, Leg]:
    """When the last one came to a meeting, of those who came before it was over for this one; and who."""
    came = (other for other in arrivals[leg.name] if other.start_ns <= leg.end_ns)
    last = max(came, key=lambda other: other.start_ns)
    return last.start_ns, last


def _before(by_who: Mapping[Who, list[Leg]], leg: Leg, at: int) -> Leg | None:
    """What came before a leg: of the same rank; before a worker's first, what its node did."""
    own = by_who[leg.who]
    number = own.index(leg)
    if number:
        return own[number - 1]
    if isinstance(leg.who, int) and leg.node in by_who:
        return max((of for of in by_who[leg.node] if of.start_ns <= at), key=lambda of: of.end_ns, default=None)
    return None


def _joined(steps: list[Step]) -> list[Step]:
    """Steps of the same rank in the same phase that follow each other are one."""
    joined: list[Step] = []
    for step in steps:
        if joined and (joined[-1].name, joined[-1].who) == (step.name, step.who):
            joined[-1] = msgspec.structs.replace(joined[-1], seconds=joined[-1].seconds + step.seconds)
        else:
            joined.append(step)
    return joined
