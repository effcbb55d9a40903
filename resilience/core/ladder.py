"""Must a stuck rank get a new process?  The short rung of the abort ladder.

If an abort cannot free a rank's main thread, the rank is replaced after a short limit, because every other rank waits
for it. That is right only for a place that nothing can free. The shell names such a place or none (`system.places`),
and time counts only while the thread sleeps at exactly that place. All other code has until `hard_timeout` to leave the
function."""

from __future__ import annotations

import msgspec

Seconds = float

LONGEST_GAP = 0.2  # seconds that one look can add at most: a watcher that did not run has observed nothing


class Ladder(msgspec.Struct, frozen=True):
    """How long a main thread has been observed asleep at one place. place: compared by equality; a thread that moved
    and returned to the same line counts as being at another place."""

    limit: Seconds
    place: object = None
    looked_at: Seconds = 0.0
    asleep_for: Seconds = 0.0

    @property
    def is_stuck(self) -> bool:
        """Return True if the main thread must be given up."""
        return self.place is not None and self.asleep_for >= self.limit


def look(ladder: Ladder, place: object, is_asleep: bool, now: Seconds) -> Ladder:
    """Return the ladder after one more look at the main thread.

    place: where it is, None if the place can be freed or is still being freed."""
    if place is None or place != ladder.place:
        return Ladder(ladder.limit, place, now)
    gap = min(now - ladder.looked_at, LONGEST_GAP) if is_asleep else 0.0
    return Ladder(ladder.limit, place, now, ladder.asleep_for + gap)
