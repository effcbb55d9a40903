"""The clocks of this host."""

from __future__ import annotations

import time


class SystemClock:
    """Monotonic seconds for everything that is measured, wall time for what is shown."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall_ns(self) -> int:
        return time.time_ns()
