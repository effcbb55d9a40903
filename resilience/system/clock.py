"""The clocks of this host."""

from __future__ import annotations

import time


class SystemClock:
    """Monotonic seconds for measurements, wall time for display."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall_ns(self) -> int:
        return time.time_ns()
