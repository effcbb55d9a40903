"""The clocks of this host."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on a monotonic clock, and wall time for display only."""

    def monotonic(self) -> float: ...

    def wall_ns(self) -> int: ...


class SystemClock:
    """Monotonic seconds for measurements, wall time for display."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall_ns(self) -> int:
        return time.time_ns()
