"""How far apart are the nodes' clocks?  Barriers of all ranks bound the difference, from the records alone.

No rank leaves a barrier before the last one has arrived. So an arrival on one node happened before a departure on
another, whatever their clocks say. Each barrier bounds the difference of two clocks from both sides; all barriers of a
run together give the tightest bounds. A clock is corrected only if the bounds prove it wrong, by the median difference
of departures. Otherwise it is unchanged, and the bound is its uncertainty. Barriers are the start of every iteration
and the launcher's rendezvous. A rendezvous belongs to the cycle that it led to: while it lasts, an agent names the
cycle before, and a newcomer knows none."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from resilience.core import encoding
from resilience.core.identity import Nanoseconds
from resilience.errors import DecodeError

_MARK = re.compile(rb'"(?:iteration\.started|call\.started|cycle\.started|regroup|rendezvous)"')
MOST_FILES = 512  # rank files read for the clocks of a large job; agents' files are always read
Meeting = tuple[str, int, int, int, int]
"""Kind, attempt, cycle, call, iteration."""


class NodeClock(msgspec.Struct, frozen=True):
    """One node's clock compared with the first node's, in nanoseconds. offset_ns: how far it is ahead; 0 unless proved.
    uncertainty_ns: possible error of the offset, None if unknown. meetings: number of barriers."""

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
    meetings: defaultdict[Meeting, dict[str, NodeAtBarrier]] = defaultdict(dict)
    files_per_node = max(1, MOST_FILES // len(files))
    for paths in files.values():
        agents = [path for path in paths if path.stem.endswith("-agent")]
        for path in [*agents, *[path for path in paths if path not in agents][:files_per_node]]:
            _collect_barriers(path, meetings)
    nodes = sorted(files)
    first = nodes[0]
    return (NodeClock(first, 0, 0), *(_compared(node, first, list(meetings.values())) for node in nodes[1:]))


def _collect_barriers(path: Path, meetings: defaultdict[Meeting, dict[str, NodeAtBarrier]]) -> None:
    arrived_ns: int | None = None  # when this file's rank last arrived at a barrier
    at_rendezvous = NodeAtBarrier()  # of the cycle that has not begun yet
    for head in _heads(path):
        origin, event = head.origin, head.event
        place = (origin.attempt, origin.cycle, origin.call, origin.iteration)
        if event.phase == "rendezvous":
            if event.event.endswith("started"):
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


def _compared(node: str, first: str, meetings: list[dict[str, NodeAtBarrier]]) -> NodeClock:
    lower_bounds: list[int] = []
    upper_bounds: list[int] = []
    departure_differences: list[int] = []
    for meeting in meetings:
        own_times, first_times = meeting.get(node), meeting.get(first)
        if own_times is None or first_times is None or own_times.left_ns is None or first_times.left_ns is None:
            continue
        if own_times.came_ns is None or first_times.came_ns is None:
            continue
        lower_bounds.append(own_times.came_ns - first_times.left_ns)
        upper_bounds.append(own_times.left_ns - first_times.came_ns)
        departure_differences.append(own_times.left_ns - first_times.left_ns)
    if not departure_differences:
        return NodeClock(node)
    lower_bound, upper_bound = max(lower_bounds), min(upper_bounds)
    if lower_bound <= 0 <= upper_bound:
        return NodeClock(node, 0, max(-lower_bound, upper_bound), len(departure_differences))
    offset = round(statistics.median(departure_differences))
    if lower_bound <= upper_bound:
        offset = min(max(offset, lower_bound), upper_bound)
    # Otherwise the clock was set or drifts: no offset fits all barriers, and the uncertainty shows it.
    return NodeClock(
        node, offset, max(abs(offset - lower_bound), abs(upper_bound - offset)), len(departure_differences)
    )
