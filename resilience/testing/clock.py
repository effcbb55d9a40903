"""What time is it, if nobody waits?  A clock that jumps from one thing due to the next."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

Seconds = float


class VirtualClock:
    """Seconds since the clock was made, and an agenda of what is due when.

    Things due at the same moment come in the order in which they were put down."""

    __slots__ = ("_agenda", "_count", "now")

    def __init__(self) -> None:
        self.now: Seconds = 0.0
        self._agenda: list[tuple[Seconds, int, tuple[Any, ...]]] = []
        self._count = 0

    def monotonic(self) -> Seconds:
        return self.now

    def wall_ns(self) -> int:
        return int(self.now * 1e9)

    def after(self, delay: Seconds, *due: Any) -> None:
        """Put down what is due in `delay` seconds, at least 0."""
        self._count += 1
        heappush(self._agenda, (self.now + delay, self._count, due))

    def next(self) -> tuple[Any, ...] | None:
        """Jump to what is due next and return it, None if nothing is."""
        if not self._agenda:
            return None
        self.now, _, due = heappop(self._agenda)
        return due
