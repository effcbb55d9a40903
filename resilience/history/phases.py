"""Which phases did a restart have, on which rank or node, and when?

A phase is stored as three numbers, because a large job has millions of phases. Times are UTC nanoseconds."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec

Place = tuple[int, int, int, int]
"""Attempt, cycle, call, iteration."""
Layer = Literal["inprocess", "launcher"]
RankOrNode = int | str
"""An initial rank, or a node of the launcher."""


class TimedPhase(msgspec.Struct, frozen=True, gc=False):
    """One phase of one rank or node, from when to when."""

    name: str
    who: RankOrNode
    node: str
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class EndedPhase(NamedTuple):
    """A stage of a cycle that has ended, in the node's monotonic time and in UTC."""

    phase: str
    ended_ns: int
    ended_wall_ns: int
    duration_s: float
    outcome: str = "completed"

    def timed(self, node: str) -> TimedPhase:
        return TimedPhase(self.phase, node, node, self.ended_wall_ns - round(self.duration_s * 1e9), self.ended_wall_ns)


class RankRestart(msgspec.Struct, frozen=True, gc=False):
    """A rank's restart that is over, because the rank has made progress or its cycle ended. If the cycle ended before
    any progress, the restart ended with the start of the worker. place: of the iteration, or the cycle of the launcher,
    that failed."""

    place: Place | tuple[int, int]
    rank: int
    duration_s: float

    @property
    def layer(self) -> Layer:
        return "launcher" if len(self.place) == 2 else "inprocess"


class PhaseTimes:
    """The phases of restarts in place, by the interrupted iteration."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int, str], int] = {}
        self._names: list[tuple[str, int, str]] = []  # phase, rank, node
        self._times: dict[Place, array[int]] = {}  # number, start, end; number, start, end; ...

    def add(self, place: Place, name: str, rank: int, node: str, end_ns: int, seconds: float) -> None:
        """Add a phase that ended."""
        key = (name, rank, node)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._names)
            self._names.append(key)
        times = self._times.get(place)
        if times is None:
            times = self._times[place] = array("q")
        times.extend((number, end_ns - round(seconds * 1e9) if seconds > 0.0 else end_ns, end_ns))

    @property
    def places(self) -> Collection[Place]:
        """Return the iterations with a known restart."""
        return self._times.keys()

    def at(self, place: Place, ranks: Collection[int] | None = None) -> Iterator[TimedPhase]:
        """Yield the phases of one restart. ranks: only these, None for all."""
        times = self._times.get(place, ())
        for first in range(0, len(times), 3):
            name, rank, node = self._names[times[first]]
            if ranks is None or rank in ranks:
                yield TimedPhase(name, rank, node, times[first + 1], times[first + 2])


def seconds_of(phases: Iterable[TimedPhase]) -> dict[str, dict[RankOrNode, float]]:
    """Return how long each phase took on each rank or node. Several intervals of one phase add up."""
    by_phase: dict[str, dict[RankOrNode, float]] = {}
    for phase in phases:
        seconds = by_phase.setdefault(phase.name, {})
        seconds[phase.who] = seconds.get(phase.who, 0.0) + (phase.end_ns - phase.start_ns) / 1e9
    return by_phase


def who_in_words(who: RankOrNode) -> str:
    """Return the name of a rank or node."""
    return f"rank {who}" if isinstance(who, int) else who
