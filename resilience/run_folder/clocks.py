"""Which barriers do a run's record files show?  For the clocks of its nodes (`history.clocks`).

Only the few lines about barriers are decoded. For a large job only some ranks of each node are read: each rank's
barriers bound the clock of its node alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from resilience.errors import DecodeError
from resilience.facts import encoding
from resilience.facts.identity import Nanoseconds, owner_of
from resilience.history.clocks import BarrierMark, NodeClock, compared, mark_kind, meetings_of

_MARK = re.compile(rb'"(?:iteration\.started|call\.started|cycle\.started|regroup|rendezvous)"')
MOST_FILES = 512  # rank files read for the clocks of a large job; agents' files are always read


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
    """Return the clocks of several nodes, () for one node. files: record files by node."""
    return compared(sorted(files), meetings_of(map(_marks, _selected(files)))) if len(files) > 1 else ()


def _selected(files: Mapping[str, Sequence[Path]]) -> Iterator[Path]:
    files_per_node = max(1, MOST_FILES // len(files))
    for paths in files.values():
        agents = [path for path in paths if owner_of(path.stem).is_agent]
        yield from [*agents, *[path for path in paths if path not in agents][:files_per_node]]


def _marks(path: Path) -> Iterator[BarrierMark]:
    try:
        with path.open("rb") as file:
            for line in file:
                mark = _mark(line) if _MARK.search(line) else None
                if mark is not None:
                    yield mark
    except OSError:
        return


def _mark(line: bytes) -> BarrierMark | None:
    try:
        head = _decode(line)
    except DecodeError:
        return None  # torn line; other barriers suffice
    origin, event = head.origin, head.event
    kind = mark_kind(event.event, event.stage, event.phase, origin.role == "rank")
    place = (origin.attempt, origin.cycle, origin.call, origin.iteration)
    return None if kind is None else BarrierMark(kind, origin.node, place, head.wall_ns)
