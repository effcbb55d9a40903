"""Does a main thread need a new process?  The short rung of the abort ladder.

A rank whose main thread an abort cannot free is replaced after a short limit, because every other rank waits for it.
That is right only for a place that nothing frees, so the shell names such a place or none
(`adapters.places`), and the time counts only while the thread sleeps at exactly that place.
Everything else has until `hard_timeout` to leave the function."""

from __future__ import annotations

import msgspec

Seconds = float

LONGEST_GAP = 0.2  # seconds that one look can add: a watcher that did not get to run has observed nothing


class Ladder(msgspec.Struct, frozen=True):
    """How long a main thread has been observed asleep at one place. place: compared by equality; a thread that has
    moved is at another place, also if it came back to the same line."""

    limit: Seconds
    place: object = None
    looked_at: Seconds = 0.0
    asleep_for: Seconds = 0.0

    @property
    def is_stuck(self) -> bool:
        """Whether the main thread has to be given up."""
        return self.place is not None and self.asleep_for >= self.limit


def look(ladder: Ladder, place: object, is_asleep: bool, now: Seconds) -> Ladder:
    """Return the ladder after one more look at the main thread.

    place: where it is, None if that is a place that can be freed, or if something is still freeing it."""
    if place is None or place != ladder.place:
        return Ladder(ladder.limit, place, now)
    gap = min(now - ladder.looked_at, LONGEST_GAP) if is_asleep else 0.0
    return Ladder(ladder.limit, place, now, ladder.asleep_for + gap)
