"""Where did the time of one restart go, and which rank did all the others wait for?

The critical path goes backwards from the rank that resumed last: phase by phase within a rank, and at a barrier of all
ranks over to the rank that arrived last, which the others waited for. Its steps add up to the whole restart."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

import msgspec

from resilience.attribution.incident import Incident
from resilience.facts import events
from resilience.history.clocks import NodeClock
from resilience.history.cycles import RESTART
from resilience.history.history import History
from resilience.history.phases import RankOrNode, TimedPhase, seconds_of

MEETINGS = frozenset(("regroup", "rendezvous"))  # barriers: phases that end for all when the last one arrives
NOTICE = "notice"  # from the first detection until this rank or node knew of it


class Step(msgspec.Struct, frozen=True):
    """A stretch of the critical path. The step before a barrier is of the rank that arrived last."""

    name: str
    who: RankOrNode
    start_ns: int
    seconds: float


class PhaseRow(msgspec.Struct, frozen=True):
    """One phase over all ranks or nodes, in seconds from the restart's start. half_s: when half had finished it."""

    name: str
    start_s: float
    half_s: float
    end_s: float
    median_s: float
    max_s: float
    slowest: RankOrNode
    count: int


class Waterfall(msgspec.Struct, frozen=True):
    """One restart. path: from the first detection to the last one's first progress.

    uncertainty_s: possible difference of two nodes' clocks; None for one node, or if unknown.
    trace_id: the id of its trace in trace viewers. left_out: nodes whose clock was set during the run."""

    incident: int
    layer: str
    kind: str
    start_ns: int
    seconds: float
    rows: tuple[PhaseRow, ...]
    path: tuple[Step, ...]
    uncertainty_s: float | None = None
    trace_id: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def longest(self) -> Step | None:
        """The step that took most of the time."""
        return max(self.path, key=lambda step: step.seconds, default=None)


def waterfall(history: History, incident: Incident, clocks: Iterable[NodeClock] = ()) -> Waterfall | None:
    """Return the restart of an incident; None if it has no records. clocks: of the run's nodes. If one was set during
    the run, only times of the other nodes are compared."""
    phases = list(history.restart_phases(incident.place))
    if not phases:
        return None
    were_set = {clock.node for clock in clocks if clock.was_set}.intersection(phase.node for phase in phases)
    comparable = {phase.node for phase in phases} - were_set or {min(were_set)}
    phases = [phase for phase in phases if phase.node in comparable]
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
        left_out=tuple(sorted(were_set - comparable)),
    )


def _rows(phases: list[TimedPhase], start: int, names: Iterable[str]) -> Iterator[PhaseRow]:
    begins: dict[str, int] = {}
    ends: dict[str, list[int]] = {}
    for phase in phases:
        name, start_ns = phase.name, phase.start_ns
        if start_ns < begins.setdefault(name, start_ns):
            begins[name] = start_ns
        ends.setdefault(name, []).append(phase.end_ns)
    seconds = seconds_of(phases)
    for name in sorted((name for name in names if name in ends), key=lambda name: begins[name]):
        durations, ended = seconds[name], sorted(ends[name])
        slowest = max(durations, key=lambda who: durations[who])
        yield PhaseRow(
            name,
            (begins[name] - start) / 1e9,
            (ended[(len(ended) - 1) // 2] - start) / 1e9,
            (ended[-1] - start) / 1e9,
            statistics.median(durations.values()),
            durations[slowest],
            slowest,
            len(ended),
        )


def critical_path(phases: Iterable[TimedPhase], start_ns: int) -> list[Step]:
    """Return the steps from `start_ns` to the end of the last phase; they add up to the whole.

    Time between two phases of a rank belongs to the earlier one, so nothing is left out."""
    by_who: dict[RankOrNode, list[TimedPhase]] = {}
    arrivals: dict[str, list[TimedPhase]] = {}
    for current in sorted(phases, key=attrgetter("start_ns", "end_ns")):
        by_who.setdefault(current.who, []).append(current)
        arrivals.setdefault(current.name, []).append(current)
    phase = max(
        (candidate for phases_of_rank in by_who.values() for candidate in phases_of_rank), key=attrgetter("end_ns")
    )
    end_ns = phase.end_ns
    steps: list[Step] = []
    visited: set[TimedPhase] = set()
    while end_ns > start_ns:
        visited.add(phase)
        begin, last = _last_arrival(phase, arrivals) if phase.name in MEETINGS else (phase.start_ns, phase)
        begin = min(end_ns, max(start_ns, begin))
        steps.append(Step(phase.name, phase.who, begin, (end_ns - begin) / 1e9))
        end_ns = begin
        previous = _previous_phase(by_who, last, end_ns)
        if previous is None or previous in visited:
            steps.append(Step(NOTICE, last.who, start_ns, (end_ns - start_ns) / 1e9))
            break
        phase = previous
    return _merged([step for step in reversed(steps) if step.seconds])


def _last_arrival(phase: TimedPhase, arrivals: Mapping[str, list[TimedPhase]]) -> tuple[int, TimedPhase]:
    """Return the last arrival at a barrier before its end for this rank: time and phase."""
    arrived = (candidate for candidate in arrivals[phase.name] if candidate.start_ns <= phase.end_ns)
    last = max(arrived, key=lambda candidate: candidate.start_ns)
    return last.start_ns, last


def _previous_phase(by_who: Mapping[RankOrNode, list[TimedPhase]], phase: TimedPhase, at: int) -> TimedPhase | None:
    """Return the previous phase of the same rank; before a worker's first phase, the phase of its node."""
    own_phases = by_who[phase.who]
    number = own_phases.index(phase)
    if number:
        return own_phases[number - 1]
    if isinstance(phase.who, int) and phase.node in by_who:
        return max(
            (candidate for candidate in by_who[phase.node] if candidate.start_ns <= at),
            key=lambda candidate: candidate.end_ns,
            default=None,
        )
    return None


def _merged(steps: list[Step]) -> list[Step]:
    """Merge consecutive steps of the same rank in the same phase."""
    joined: list[Step] = []
    for step in steps:
        if joined and (joined[-1].name, joined[-1].who) == (step.name, step.who):
            joined[-1] = msgspec.structs.replace(joined[-1], seconds=joined[-1].seconds + step.seconds)
        else:
            joined.append(step)
    return joined
