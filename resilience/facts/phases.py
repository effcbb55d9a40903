"""Does an occurrence lie outside the known phases of a job?  Positions, counted from a cold start.

`calibration.recurring_phases` finds the positions at which all runs are slow."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

WIDE = 1  # occurrences before and after a position that belong to it


class Phases(msgspec.Struct, frozen=True):
    """The positions of known phases, in ascending order; may be empty. until: the first unknown position."""

    positions: tuple[int, ...]
    until: int

    def is_outside(self, number: int) -> bool:
        """Return True if an occurrence, counted from 0 after a cold start, is known to lie outside all phases."""
        if not 0 <= number < self.until:
            return False
        at = bisect_left(self.positions, number - WIDE)
        return at == len(self.positions) or self.positions[at] > number + WIDE

    def is_expected(self, number: int) -> bool:
        """Return True if all runs were slow at the position of this occurrence."""
        at = bisect_left(self.positions, number)
        return at < len(self.positions) and self.positions[at] == number
