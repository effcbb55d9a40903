"""How long has a process waited, if the process itself may have been stopped meanwhile?

While a process is stopped (SIGSTOP, a paused virtual machine), what it waits for is often stopped too and needs that
time to answer afterwards. So the waiting process looks often, and a long gap between two looks counts little."""

from __future__ import annotations

import math

Seconds = float


class Elapsed:
    """The seconds since a moment, without those in which this process was stopped."""

    def __init__(self, since: Seconds, longest: Seconds = math.inf) -> None:
        """longest: how much a gap between two looks counts at most."""
        self._looked_at = since
        self._longest = longest
        self._total = 0.0

    def look(self, now: Seconds) -> Seconds:
        """Return the seconds that count so far. Call it more often than every `longest` seconds."""
        self._total += min(now - self._looked_at, self._longest)
        self._looked_at = now
        return self._total
