"""Where did the time of one restart go, and whom did all the others wait for?

The critical path is walked backwards from the rank that was back last: within a rank phase by phase; where all ranks
meet, over to the one that came last, for which the others waited. Its steps add up to the whole restart."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from resilience.attribution.incident import Incident
from resilience.core import events
from resilience.history.cycles import RESTART
from resilience.history.history import History
from resilience.history.phases import TimedPhase, Who, seconds_of

MEETINGS = frozenset(("regroup", "rendezvous"))  # phases that end for all when the last one has come
NOTICE = "notice"  # from the first detection until this rank or node knew of it


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


def waterfall(history: History, incident: Incident) -> Waterfall | None:
    """Return how the restart of an incident went; None if nothing of it is on record."""
    phases = list(history.restart_phases(incident.place))
    if not phases:
        return None
    start = min(phase.start_ns for phase in phases)
    is_one_node = len({phase.node for phase in phases}) == 1
    if incident.layer == "inprocess" and incident.detected_wall_ns is not None and is_one_node:
        start = min(start, incident.detected_wall_ns)  # a dead rank has no phases of its own
    end = max(phase.end_ns for phase in phases)
    return Waterfall(
        incident.number,
        incident.layer,
        incident.kind,
        start,
        (end - start) / 1e9,
        tuple(_rows(phases, start, RESTART if incident.layer == "launcher" else events.PHASES)),
        tuple(critical_path(phases, start)),
    )


def _rows(phases: list[TimedPhase], start: int, names: Iterable[str]) -> Iterator[Row]:
    begins: dict[str, int] = {}
    for phase in phases:
        begins[phase.name] = min(phase.start_ns, begins.get(phase.name, phase.start_ns))
    for name in sorted(names, key=lambda name: begins.get(name, 0)):
        of = [phase for phase in phases if phase.name == name]
        if of:
            took = seconds_of(of)[name]
            slowest = max(took, key=lambda who: took[who])
            ends = sorted(phase.end_ns for phase in of)
            yield Row(
                name,
                (min(phase.start_ns for phase in of) - start) / 1e9,
                (ends[(len(ends) - 1) // 2] - start) / 1e9,
                (ends[-1] - start) / 1e9,
                statistics.median(took.values()),
                took[slowest],
                slowest,
                len(of),
            )


def critical_path(phases: Iterable[TimedPhase], start_ns: int) -> list[Step]:
    """Return the steps from `start_ns` to the end of the last phase; they add up to the whole.

    Time between two phases of a rank belongs to the earlier one: nothing is left out."""
    by_who: dict[Who, list[TimedPhase]] = {}
    arrivals: dict[str, list[TimedPhase]] = {}
    for one in sorted(phases, key=lambda phase: (phase.start_ns, phase.end_ns)):
        by_who.setdefault(one.who, []).append(one)
        arrivals.setdefault(one.name, []).append(one)
    phase = max((found for of in by_who.values() for found in of), key=lambda phase: phase.end_ns)
    at = phase.end_ns
    steps: list[Step] = []
    visited: set[TimedPhase] = set()
    while at > start_ns:
        visited.add(phase)
        begin, last = _came_last(phase, arrivals) if phase.name in MEETINGS else (phase.start_ns, phase)
        begin = min(at, max(start_ns, begin))
        steps.append(Step(phase.name, phase.who, begin, (at - begin) / 1e9))
        at = begin
        before = _before(by_who, last, at)
        if before is None or before in visited:
            steps.append(Step(NOTICE, last.who, start_ns, (at - start_ns) / 1e9))
            break
        phase = before
    return _joined([step for step in reversed(steps) if step.seconds])


def _came_last(phase: TimedPhase, arrivals: Mapping[str, list[TimedPhase]]) -> tuple[int, TimedPhase]:
    """When the last one came to a meeting, of those who came before it was over for this one; and who."""
    came = (other for other in arrivals[phase.name] if other.start_ns <= phase.end_ns)
    last = max(came, key=lambda other: other.start_ns)
    return last.start_ns, last


def _before(by_who: Mapping[Who, list[TimedPhase]], phase: TimedPhase, at: int) -> TimedPhase | None:
    """What came before a phase: of the same rank; before a worker's first, what its node did."""
    own = by_who[phase.who]
    number = own.index(phase)
    if number:
        return own[number - 1]
    if isinstance(phase.who, int) and phase.node in by_who:
        return max((of for of in by_who[phase.node] if of.start_ns <= at), key=lambda of: of.end_ns, default=None)
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
