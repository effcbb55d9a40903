"""How far apart are the nodes' clocks?  What meetings of all ranks prove, from the records alone.

Nobody leaves a meeting before the last one has come: an arrival on one node happened before a departure
on another one, whatever their clocks say. Each meeting bounds the difference of two clocks from both
sides; all meetings of a run together bound it best. A clock is corrected only where the bounds prove it
wrong, by the typical difference of departures; otherwise it is left alone, and the bound is its
uncertainty. Meetings: the start of every iteration, and the launcher's rendezvous."""

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

_MARK = re.compile(rb'"(?:iteration\.started|call\.started|regroup|rendezvous)"')
MOST_FILES = 512  # that are read for the clocks of a large job, agents' beside them
Meeting = tuple[str, int, int, int, int]
"""Kind, attempt, cycle, call, iteration."""


class Clock(msgspec.Struct, frozen=True):
    """One node's clock beside the first node's, in nanoseconds. offset_ns: how far it is taken to be ahead;
    0 unless proved. uncertainty_ns: how far from that it may be; None: nothing is known."""

    node: str
    offset_ns: int = 0
    uncertainty_ns: int | None = None
    meetings: int = 0


class Seen(msgspec.Struct):
    """One node at one meeting: when its last rank came and its first one left, by its own clock."""

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


def clocks(files: Mapping[str, Sequence[Path]]) -> tuple[Clock, ...]:
    """Return the clocks of several nodes. files: record files by node. One node has one clock: ().

    Of a large job's nodes some ranks are read: each rank's meetings bound its node's clock by themselves."""
    if len(files) < 2:
        return ()
    meetings: defaultdict[Meeting, dict[str, Seen]] = defaultdict(dict)
    of_node = max(1, MOST_FILES // len(files))
    for paths in files.values():
        agents = [path for path in paths if path.stem.endswith("-agent")]
        for path in [*agents, *[path for path in paths if path not in agents][:of_node]]:
            _note(path, meetings)
    nodes = sorted(files)
    first = nodes[0]
    return (Clock(first, 0, 0), *(_compared(node, first, list(meetings.values())) for node in nodes[1:]))


def _note(path: Path, meetings: defaultdict[Meeting, dict[str, Seen]]) -> None:
    came: int | None = None  # when this file's rank last came to a meeting
    for head in _heads(path):
        origin, event = head.origin, head.event
        place = (origin.attempt, origin.cycle, origin.call, origin.iteration)
        if event.phase == "rendezvous":
            key: Meeting = ("rendezvous", *place)
            seen = meetings[key].setdefault(origin.node, Seen())
            (seen.came if event.event.endswith("started") else seen.left)(head.wall_ns)
        elif origin.role != "rank":
            continue
        elif event.event == "iteration.started":
            key = ("iteration", *place)
            seen = meetings[key].setdefault(origin.node, Seen())
            seen.left(head.wall_ns)
            if came is not None:
                seen.came(came)
        elif event.event == "call.started" or (event.event == "stage.started" and event.stage == "regroup"):
            came = head.wall_ns


def _heads(path: Path) -> Iterable[_Head]:
    try:
        with path.open("rb") as file:
            for line in file:
                if _MARK.search(line):
                    try:
                        yield _decode(line)
                    except DecodeError:
                        continue  # torn: other meetings tell as much
    except OSError:
        return


def _compared(node: str, first: str, meetings: list[dict[str, Seen]]) -> Clock:
    low: list[int] = []
    high: list[int] = []
    typical: list[int] = []
    for meeting in meetings:
        here, there = meeting.get(node), meeting.get(first)
        if here is None or there is None or here.left_ns is None or there.left_ns is None:
            continue
        if here.came_ns is None or there.came_ns is None:
            continue
        low.append(here.came_ns - there.left_ns)
        high.append(here.left_ns - there.came_ns)
        typical.append(here.left_ns - there.left_ns)
    if not typical:
        return Clock(node)
    least, most = max(low), min(high)
    if least <= 0 <= most:
        return Clock(node, 0, max(-least, most), len(typical))
    offset = round(statistics.median(typical))
    if least <= most:
        offset = min(max(offset, least), most)
    # Else the clock was set, or runs away: no offset holds throughout, and the uncertainty says so.
    return Clock(node, offset, max(abs(offset - least), abs(most - offset)), len(typical))
