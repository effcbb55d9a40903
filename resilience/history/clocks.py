"""How far apart are the nodes' clocks?  Barriers of all ranks bound the difference, from the records alone.

No rank leaves a barrier before the last one has arrived. So an arrival on one node happened before a departure on
another, whatever their clocks say. Each barrier bounds the difference of two clocks from both sides; all barriers of a
run together give the tightest bounds. A clock is corrected only if the bounds prove it wrong, by the median difference
of departures. Otherwise it is unchanged, and the bound is its uncertainty. A clock that was set during the run has no
offset that is right for the whole run, so it is unchanged too.

The reference is a node that agrees with most clocks, so that a single wrong clock is the one that is corrected. Two
nodes that never met are compared over others that both have met. Barriers are the start of every iteration and the
launcher's rendezvous. A rendezvous belongs to the cycle that it led to: while it lasts, an agent names the cycle
before, and a newcomer knows none."""

from __future__ import annotations

import heapq
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from resilience.facts import events
from resilience.facts.records import Record

UNKNOWN_NS = 10**15
"""A possible error that stands for an unknown one, in nanoseconds: 12 days."""

DRIFT = 500e-6
"""The largest change of a clock's rate that is no change of its time. Source: adjtimex(2), which allows 500 ppm."""

REFERENCES = 3  # nodes tried as the reference, until at most half of the clocks seem to have been set

MarkKind = Literal["arrived", "iteration", "rendezvous", "met", "cycle"]
Meeting = tuple[str, int, int, int, int]
"""Kind, attempt, cycle, call, iteration."""


class BarrierMark(msgspec.Struct, frozen=True):
    """What one record says about a barrier. kind: a rank arrived, an iteration started, a rendezvous began or ended, a
    cycle started. place: attempt, cycle, call, iteration. at_ns: by the clock of the node."""

    kind: MarkKind
    node: str
    place: tuple[int, int, int, int]
    at_ns: int


class NodeClock(msgspec.Struct, frozen=True):
    """One node's clock compared with the reference node's, in nanoseconds. offset_ns: how far it is ahead; 0 unless
    proved. uncertainty_ns: possible error of the offset, None if unknown. meetings: number of barriers. was_set: this
    clock or the reference's was set during the run."""

    node: str
    offset_ns: int = 0
    uncertainty_ns: int | None = None
    meetings: int = 0
    was_set: bool = False


class NodeAtBarrier(msgspec.Struct):
    """One node at one barrier: when its last rank arrived and its first one left, by its own clock."""

    came_ns: int | None = None
    left_ns: int | None = None

    def came(self, at: int) -> None:
        self.came_ns = at if self.came_ns is None else max(self.came_ns, at)

    def left(self, at: int) -> None:
        self.left_ns = at if self.left_ns is None else min(self.left_ns, at)


Barrier = dict[str, NodeAtBarrier]
"""All nodes at one barrier."""


class _Difference(msgspec.Struct, frozen=True):
    """How far one clock is ahead of another: bounds and estimate. lower > upper: a clock drifts, or was set."""

    lower: int
    estimate: int
    upper: int
    meetings: int
    was_set: bool = False

    def chained(self, nearer: _Difference) -> _Difference:
        """Return the difference over a node in between. nearer: of that node's clock to the reference."""
        (lower, upper), (nearer_lower, nearer_upper) = (
            (min(difference.lower, difference.upper), max(difference.lower, difference.upper))
            for difference in (self, nearer)
        )
        estimate, meetings = self.estimate + nearer.estimate, min(self.meetings, nearer.meetings)
        was_set = self.was_set or nearer.was_set
        return _Difference(lower + nearer_lower, estimate, upper + nearer_upper, meetings, was_set)

    def clock(self, node: str) -> NodeClock:
        """Return the clock of a node with this difference to the reference."""
        lower, upper = sorted((self.lower, self.upper))  # a clock that drifts had every difference between them
        is_unproved = self.was_set or lower <= 0 <= upper
        offset = 0 if is_unproved else min(max(self.estimate, lower), upper)
        uncertainty = max(abs(offset - lower), abs(upper - offset))
        return NodeClock(node, offset, uncertainty, self.meetings, self.was_set)


def mark_kind(tag: str, stage: str, phase: str, is_rank: bool) -> MarkKind | None:
    """Return what an event says about a barrier, None if nothing. is_rank: a rank recorded it."""
    if phase == "rendezvous":
        return "rendezvous" if tag == "cycle.phase.started" else "met"
    if tag == "cycle.started":
        return "cycle"
    if not is_rank:
        return None
    if tag == "iteration.started":
        return "iteration"
    return "arrived" if tag == "call.started" or (tag == "stage.started" and stage == "regroup") else None


def marks_of(records: Iterable[Record]) -> list[BarrierMark]:
    """Return what the records of one file say about barriers, in their order."""
    marks = []
    for record in records:
        event = record.event
        if type(event) in _OF_BARRIERS:
            origin, tag = record.origin, str(event.__struct_config__.tag)
            kind = mark_kind(tag, getattr(event, "stage", ""), getattr(event, "phase", ""), origin.role == "rank")
            if kind is not None:
                place = (origin.attempt, origin.cycle, origin.call or 0, origin.iteration or 0)
                marks.append(BarrierMark(kind, origin.node, place, record.wall_ns))
    return marks


_OF_BARRIERS = frozenset(
    (
        events.CallStarted,
        events.CyclePhaseEnded,
        events.CyclePhaseStarted,
        events.CycleStarted,
        events.IterationStarted,
        events.StageStarted,
    )
)


def meetings_of(files: Iterable[Iterable[BarrierMark]]) -> Iterable[Barrier]:
    """Return the barriers of a job. files: the marks of each record file."""
    meetings: defaultdict[Meeting, Barrier] = defaultdict(dict)
    for marks in files:
        _collect(marks, meetings)
    return meetings.values()


def offsets_of(clocks: Iterable[NodeClock]) -> dict[str, int]:
    """Return how far each node's clock is ahead, in nanoseconds."""
    return {clock.node: clock.offset_ns for clock in clocks}


def errors_of(clocks: Sequence[NodeClock]) -> dict[str, int]:
    """Return by how much the corrected clock of each of several nodes may be wrong, in nanoseconds."""
    if len(clocks) < 2:
        return {}
    return {clock.node: UNKNOWN_NS if clock.uncertainty_ns is None else clock.uncertainty_ns for clock in clocks}


def compared(nodes: Sequence[str], meetings: Iterable[Barrier]) -> tuple[NodeClock, ...]:
    """Return the clocks of all nodes, compared with one that agrees with most of them.

    That is the clock in the middle, or any that may equal it: of these, the node that met most others, then the one
    that is known best. If two halves disagree, the half with the node that met most counts as right."""
    by_node: defaultdict[str, list[Barrier]] = defaultdict(list)
    whole = _whole(meetings)
    for meeting in whole:
        for node in meeting:
            by_node[node].append(meeting)
    met = _numbers_met(whole)
    for reference in sorted(nodes, key=lambda node: (-met[node], node))[:REFERENCES]:
        node_clocks = _clocks(reference, by_node)
        if 2 * sum(clock.was_set for clock in node_clocks.values()) <= len(node_clocks):
            break
    offsets = [clock.offset_ns for clock in node_clocks.values()]
    middle = (statistics.median_low(offsets), statistics.median_high(offsets))
    agreeing = [clock for clock in node_clocks.values() if _may_be_one_of(clock, middle)]
    best = min(
        agreeing, key=lambda clock: (clock.was_set, -met[clock.node], clock.uncertainty_ns or 0, clock.node)
    ).node
    if best != reference:
        node_clocks = _clocks(best, by_node)
    return tuple(node_clocks.get(node, NodeClock(node)) for node in nodes)


def largest_difference_ns(nodes: Iterable[NodeClock]) -> int | None:
    """Return by how much the corrected clocks of two nodes may differ; None for one node, or if one is unknown."""
    bounds = [clock.uncertainty_ns for clock in nodes]
    known = [bound for bound in bounds if bound is not None]
    return sum(heapq.nlargest(2, known)) if len(known) == len(bounds) > 1 else None


def _collect(marks: Iterable[BarrierMark], meetings: defaultdict[Meeting, Barrier]) -> None:
    arrived_ns: int | None = None  # when this file's rank last arrived at a barrier
    at_rendezvous = NodeAtBarrier()  # of the cycle that has not begun yet
    for mark in marks:
        match mark.kind:
            case "rendezvous":
                at_rendezvous = NodeAtBarrier(came_ns=mark.at_ns)
            case "met":
                at_rendezvous.left_ns = mark.at_ns
            case "cycle":
                rendezvous: Meeting = ("rendezvous", *mark.place)
                meetings[rendezvous][mark.node] = at_rendezvous
                at_rendezvous = NodeAtBarrier()
            case "iteration":
                iteration: Meeting = ("iteration", *mark.place)
                node_times = meetings[iteration].setdefault(mark.node, NodeAtBarrier())
                node_times.left(mark.at_ns)
                if arrived_ns is not None:
                    node_times.came(arrived_ns)
            case "arrived":
                arrived_ns = mark.at_ns


def _whole(meetings: Iterable[Barrier]) -> list[Barrier]:
    """Return the barriers of several nodes, with the nodes of which both times are known."""
    known = ({node: at for node, at in meeting.items() if None not in (at.came_ns, at.left_ns)} for meeting in meetings)
    return [meeting for meeting in known if len(meeting) > 1]


def _may_be_one_of(clock: NodeClock, offsets: Iterable[int]) -> bool:
    return any(abs(clock.offset_ns - offset) <= (clock.uncertainty_ns or 0) for offset in offsets)


def _numbers_met(meetings: Iterable[Barrier]) -> Counter[str]:
    """Return how many other nodes each node has met."""
    others: defaultdict[str, set[str]] = defaultdict(set)
    for members in {frozenset(meeting) for meeting in meetings}:  # few: most barriers have the same nodes
        for node in members:
            others[node] |= members
    return Counter({node: len(members) - 1 for node, members in others.items()})


def _clocks(reference: str, by_node: Mapping[str, Sequence[Barrier]]) -> dict[str, NodeClock]:
    return {node: difference.clock(node) for node, difference in _differences(reference, by_node).items()}


def _differences(reference: str, by_node: Mapping[str, Sequence[Barrier]]) -> dict[str, _Difference]:
    """Return the differences to a reference node, of all nodes that it met, directly or over as few others as possible.

    by_node: the barriers of each node."""
    differences = {reference: _Difference(0, 0, 0, 0)}
    remaining = set(by_node) - {reference}
    reached = deque([reference])
    while reached and remaining:
        between = reached.popleft()
        shared: defaultdict[str, list[Barrier]] = defaultdict(list)
        for meeting in by_node.get(between, ()):
            for node in meeting.keys() & remaining:
                shared[node].append(meeting)
        for node in sorted(shared):
            difference = _difference(node, between, shared[node])
            differences[node] = difference if between == reference else difference.chained(differences[between])
        reached.extend(sorted(shared))
        remaining -= shared.keys()
    return differences


def _difference(node: str, other: str, meetings: Sequence[Barrier]) -> _Difference:
    """Return how far a node's clock is ahead of another's. meetings: barriers of both, with both times."""
    lower_bounds: list[int] = []
    upper_bounds: list[int] = []
    departure_differences: list[int] = []
    for meeting in meetings:
        own, others = meeting[node], meeting[other]
        assert own.came_ns is not None and own.left_ns is not None
        assert others.came_ns is not None and others.left_ns is not None
        lower_bounds.append(own.came_ns - others.left_ns)
        upper_bounds.append(own.left_ns - others.came_ns)
        departure_differences.append(own.left_ns - others.left_ns)
    estimate = round(statistics.median(departure_differences))
    lower, upper = max(lower_bounds), min(upper_bounds)
    times = [at for meeting in meetings for at in (meeting[node].came_ns, meeting[node].left_ns) if at is not None]
    was_set = lower - upper > DRIFT * (max(times) - min(times))
    return _Difference(lower, estimate, upper, len(meetings), was_set)
