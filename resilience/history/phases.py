"""Which phases did a restart have, on which rank or node, and when?

A phase is kept in three numbers, for a large job has millions of them. Times are UTC nanoseconds."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator

import msgspec

Place = tuple[int, int, int, int]
"""Attempt, cycle, call, iteration."""
Who = int | str
"""An initial rank, or a node of the launcher."""


class TimedPhase(msgspec.Struct, frozen=True):
    """One phase of one rank or node, from when to when."""

    name: str
    who: Who
    node: str
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class PhaseTimes:
    """The phases of the restarts that ranks did by themselves, by the iteration that was interrupted."""

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
        times.extend((number, end_ns - round(max(0.0, seconds) * 1e9), end_ns))

    @property
    def places(self) -> Collection[Place]:
        """The iterations of which restarts are known."""
        return self._times.keys()

    def at(self, place: Place, ranks: Collection[int] | None = None) -> Iterator[TimedPhase]:
        """Yield the phases of one restart. ranks: of these only."""
        times = self._times.get(place, ())
        for first in range(0, len(times), 3):
            name, rank, node = self._names[times[first]]
            if ranks is None or rank in ranks:
                yield TimedPhase(name, rank, node, times[first + 1], times[first + 2])


def seconds_of(phases: Iterable[TimedPhase]) -> dict[str, dict[Who, float]]:
    """Return how long each phase took on each rank or node; several stretches of one phase add up."""
    found: dict[str, dict[Who, float]] = {}
    for phase in phases:
        of_phase = found.setdefault(phase.name, {})
        of_phase[phase.who] = of_phase.get(phase.who, 0.0) + phase.seconds
    return found
