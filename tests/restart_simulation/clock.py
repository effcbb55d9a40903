"""What time is it without waiting?  A clock that jumps from one due event to the next."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

Seconds = float


class VirtualClock:
    """Seconds since the clock's creation, and an agenda of due events.

    Events due at the same moment come in the order in which they were scheduled."""

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
        """Schedule an event in `delay` seconds, at least 0."""
        self._count += 1
        heappush(self._agenda, (self.now + delay, self._count, due))

    def next(self) -> tuple[Any, ...] | None:
        """Jump to the next due event and return it, None if there is none."""
        if not self._agenda:
            return None
        self.now, _, due = heappop(self._agenda)
        return due
