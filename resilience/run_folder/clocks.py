"""How far apart are the nodes' clocks?  Barriers of all ranks bound the difference, from the records alone.

No rank leaves a barrier before the last one has arrived. So an arrival on one node happened before a departure on
another, whatever their clocks say. Each barrier bounds the difference of two clocks from both sides; all barriers of a
run together give the tightest bounds. A clock is corrected only if the bounds prove it wrong, by the median difference
of departures. Otherwise it is unchanged, and the bound is its uncertainty.

The reference is a node that agrees with most clocks, so that a single wrong clock is the one that is corrected. Two
nodes that never met are compared over others that both have met. Barriers are the start of every iteration and the
launcher's rendezvous. A rendezvous belongs to the cycle that it led to: while it lasts, an agent names the cycle
before, and a newcomer knows none."""

from __future__ import annotations

import heapq
import re
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from resilience.errors import DecodeError
from resilience.facts import encoding
from resilience.facts.identity import Nanoseconds, owner_of

_MARK = re.compile(rb'"(?:iteration\.started|call\.started|cycle\.started|regroup|rendezvous)"')
MOST_FILES = 512  # rank files read for the clocks of a large job; agents' files are always read
Meeting = tuple[str, int, int, int, int]
"""Kind, attempt, cycle, call, iteration."""


class NodeClock(msgspec.Struct, frozen=True):
    """One node's clock compared with the reference node's, in nanoseconds. offset_ns: how far it is ahead; 0 unless
    proved. uncertainty_ns: possible error of the offset, None if unknown. meetings: number of barriers."""

    node: str
    offset_ns: int = 0
    uncertainty_ns: int | None = None
    meetings: int = 0


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
    """How far one clock is ahead of another: bounds and estimate. lower > upper: a clock was set, or drifts."""

    lower: int
    estimate: int
    upper: int
    meetings: int

    def chained(self, nearer: _Difference) -> _Difference:
        """Return the difference over a node in between. nearer: of that node's clock to the reference."""
        (lower, upper), (nearer_lower, nearer_upper) = (
            (min(difference.lower, difference.upper), max(difference.lower, difference.upper))
            for difference in (self, nearer)
        )
        estimate, meetings = self.estimate + nearer.estimate, min(self.meetings, nearer.meetings)
        return _Difference(lower + nearer_lower, estimate, upper + nearer_upper, meetings)

    def clock(self, node: str) -> NodeClock:
        """Return the clock of a node with this difference to the reference."""
        lower, offset, upper = self.lower, self.estimate, self.upper
        if lower <= 0 <= upper:
            return NodeClock(node, 0, max(-lower, upper), self.meetings)
        if lower <= upper:
            offset = min(max(offset, lower), upper)
        # Otherwise no offset fits all barriers, and the uncertainty shows it.
        return NodeClock(node, offset, max(abs(offset - lower), abs(upper - offset)), self.meetings)


class _Origin(msgspec.Struct):
    node: str
    role: str
    attempt: int = 0
    cycle: int = 0
    call: int = 0
    iteration: int = 0
    initial_rank: int | None = None


class _Event(msgspec.Struct):
    event: str
    stage: str = ""
    phase: str = ""


class _Head(msgspec.Struct):
    wall_ns: Nanoseconds
    origin: _Origin
    event: _Event


_decode = encoding.reader(_Head)


def clocks(files: Mapping[str, Sequence[Path]]) -> tuple[NodeClock, ...]:
    """Return the clocks of several nodes, () for one node. files: record files by node.

    For a large job only some ranks of each node are read: each rank's barriers bound the clock of its node alone."""
    if len(files) < 2:
        return ()
    meetings: defaultdict[Meeting, Barrier] = defaultdict(dict)
    files_per_node = max(1, MOST_FILES // len(files))
    for paths in files.values():
        agents = [path for path in paths if owner_of(path.stem).is_agent]
        for path in [*agents, *[path for path in paths if path not in agents][:files_per_node]]:
            _collect_barriers(path, meetings)
    return compared(sorted(files), meetings.values())


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
    reference = min(nodes, key=lambda node: (-met[node], node))
    node_clocks = _clocks(reference, by_node)
    offsets = [clock.offset_ns for clock in node_clocks.values()]
    middle = (statistics.median_low(offsets), statistics.median_high(offsets))
    agreeing = [clock for clock in node_clocks.values() if _may_be_one_of(clock, middle)]
    best = min(agreeing, key=lambda clock: (-met[clock.node], clock.uncertainty_ns or 0, clock.node)).node
    if best != reference:
        node_clocks = _clocks(best, by_node)
    return tuple(node_clocks.get(node, NodeClock(node)) for node in nodes)


def largest_difference_ns(nodes: Iterable[NodeClock]) -> int | None:
    """Return by how much the corrected clocks of two nodes may differ; None for one node, or if one is unknown."""
    bounds = [clock.uncertainty_ns for clock in nodes]
    known = [bound for bound in bounds if bound is not None]
    return sum(heapq.nlargest(2, known)) if len(known) == len(bounds) > 1 else None


def _collect_barriers(path: Path, meetings: defaultdict[Meeting, Barrier]) -> None:
    arrived_ns: int | None = None  # when this file's rank last arrived at a barrier
    at_rendezvous = NodeAtBarrier()  # of the cycle that has not begun yet
    for head in _heads(path):
        origin, event = head.origin, head.event
        place = (origin.attempt, origin.cycle, origin.call, origin.iteration)
        if event.phase == "rendezvous":
            if event.event == "cycle.phase.started":
                at_rendezvous = NodeAtBarrier(came_ns=head.wall_ns)
            else:
                at_rendezvous.left_ns = head.wall_ns
        elif event.event == "cycle.started":
            meeting: Meeting = ("rendezvous", *place)
            meetings[meeting][origin.node] = at_rendezvous
            at_rendezvous = NodeAtBarrier()
        elif origin.role != "rank":
            continue
        elif event.event == "iteration.started":
            key: Meeting = ("iteration", *place)
            node_times = meetings[key].setdefault(origin.node, NodeAtBarrier())
            node_times.left(head.wall_ns)
            if arrived_ns is not None:
                node_times.came(arrived_ns)
        elif event.event == "call.started" or (event.event == "stage.started" and event.stage == "regroup"):
            arrived_ns = head.wall_ns


def _heads(path: Path) -> Iterable[_Head]:
    try:
        with path.open("rb") as file:
            for line in file:
                if _MARK.search(line):
                    try:
                        yield _decode(line)
                    except DecodeError:
                        continue  # torn line; other barriers suffice
    except OSError:
        return


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
    return _Difference(max(lower_bounds), estimate, min(upper_bounds), len(meetings))
