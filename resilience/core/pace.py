"""When does a monitor read what its rank records, and when does it look at the rank?

A restarting rank writes about thirty records within 50 ms, on the processors on which its peers restart. So records
that can wait are read together, and no record makes the monitor look at the rank at once. Everything more urgent (the
rank's end, a request, a limit that is due) is handled immediately.

Times and durations are seconds of a monotonic clock."""

from __future__ import annotations

import msgspec

EVERY = 0.01  # seconds between two reads, and between two looks, if only records ask for them
LONG_AGO = float("-inf")


class Pace(msgspec.Struct, frozen=True):
    """The schedule of a monitor's own work. read_at, look_at: the earliest time if only records ask for it."""

    read_at: float = LONG_AGO
    look_at: float = LONG_AGO
    has_news: bool = False  # since the last look
    is_asked: bool = False  # something more than a record needs a look

    def heard(self) -> Pace:
        """Return the pace after the rank sent something."""
        return Pace(self.read_at, self.look_at, True, self.is_asked)

    def recorded(self, now: float) -> Pace:
        """Return the pace after a record: anything that follows can wait."""
        return Pace(now + EVERY, self.look_at, True, self.is_asked)

    def asked(self) -> Pace:
        """Return the pace after more than a record, or after another event."""
        return Pace(LONG_AGO, self.look_at, True, True)

    def looked(self, now: float) -> Pace:
        """Return the pace after the monitor looked at its rank."""
        return Pace(self.read_at, now + EVERY)

    def reads(self, now: float) -> bool:
        """Return True if messages of the rank are read as soon as they arrive."""
        return now >= self.read_at

    def looks(self, now: float, due: float) -> bool:
        """Return True if it is time to look at the rank. due: when a look is due without news."""
        return self.is_asked or now >= min(due, self.look_at)

    def wake_at(self, now: float, due: float) -> float:
        """Return when to wake up unless news arrives earlier. due: when a look is due without news."""
        at = due if self.reads(now) else min(due, self.read_at)
        return min(at, self.look_at) if self.has_news else at
