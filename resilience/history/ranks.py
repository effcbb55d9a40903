"""What did each rank do over time?  Its iterations or the lifetimes of its workers, with how each ended.

A stretch is stored as four numbers, because a large job has many. Times are UTC nanoseconds. A stretch without a
recorded end is open. If a later cycle has begun, it is lost, and it ended when the last stretch of its cycle did.
Of ranks that were lost in the last cycle, `History.lost_at` knows the end."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from resilience.history.phases import Place

_Name = TypeVar("_Name", str, Place)
WORKER = -1
"""Call and iteration of a place that stands for a worker's whole lifetime in a cycle."""


class Stretch(msgspec.Struct, frozen=True):
    """A rank's iteration, or its worker's lifetime.

    kind: how it ended: completed, interrupted, failed, left, lost, open."""

    begin_ns: int
    end_ns: int
    kind: str
    place: Place


class RankHistory:
    """The stretches of all ranks, by initial rank. is_kept: if False, there are none."""

    def __init__(self, is_kept: bool = True) -> None:
        self._is_kept = is_kept
        self._open: dict[int, dict[Place, int]] = {}
        self._ended: dict[int, array[int]] = {}
        self._places: list[Place] = []
        self._kinds: list[str] = []
        self._numbers: dict[object, int] = {}
        self._ends: dict[tuple[int, int], int] = {}  # when the last stretch ended, or else began, by attempt and cycle

    def begin(self, rank: int, place: Place, at_ns: int) -> None:
        """Begin a stretch, unless it has begun."""
        if self._is_kept:
            self._open.setdefault(rank, {}).setdefault(place, at_ns)
            self._ends.setdefault(place[:2], at_ns)

    def end(self, rank: int, place: Place, at_ns: int, kind: str) -> None:
        """End a stretch. A stretch without a known beginning is ignored."""
        begin_ns = self._open.get(rank, {}).pop(place, None)
        if begin_ns is not None:
            ended = self._ended.get(rank)
            if ended is None:
                ended = self._ended[rank] = array("q")
            begin_ns = min(begin_ns, at_ns)  # the clock may have been set back
            self._ends[place[:2]] = max(at_ns, self._ends[place[:2]])
            ended.extend((begin_ns, at_ns, self._number(kind, self._kinds), self._number(place, self._places)))

    @property
    def ranks(self) -> list[int]:
        """Return all known ranks, sorted."""
        return sorted(self._open.keys() | self._ended.keys())

    def stretches(self, rank: int, now_ns: int) -> Iterator[Stretch]:
        """Yield the stretches of a rank. now_ns: the end of stretches that are still open."""
        ended = self._ended.get(rank, ())
        for first in range(0, len(ended), 4):
            begin, end, kind, place = ended[first : first + 4]
            yield Stretch(begin, end, self._kinds[kind], self._places[place])
        for opened, begin in self._open.get(rank, {}).items():
            is_last = opened[:2] == max(self._ends)
            end_ns = now_ns if is_last else max(begin, self._ends[opened[:2]])
            yield Stretch(begin, end_ns, "open" if is_last else "lost", opened)

    def _number(self, value: _Name, values: list[_Name]) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(values)
            values.append(value)
        return number
