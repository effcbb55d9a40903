"""How many occurrences after a start are warm-up?  They are slower than later ones, and have limits of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from resilience.calibration.fitting import NEAR_TOP

LONGEST_WARM_UP, SETTLED = 50, 5  # occurrences


def warm_up(runs: Iterable[Sequence[float]]) -> int:
    """Return how many occurrences after a start are warm-up, one number for all runs. A warm-up of more than half of
    the given durations shows only in comparison with those after the longest warm-up; these are few, so that the
    difference has to be large."""
    longest = 1
    for durations in runs:
        after = sorted(durations[LONGEST_WARM_UP:])
        most = after[len(after) // 2] if len(after) >= SETTLED else math.inf
        for start in range(min(LONGEST_WARM_UP, len(durations)) + 1):
            later = sorted(durations[start:])
            if len(later) < SETTLED:
                break
            median = later[len(later) // 2]
            limit = NEAR_TOP * (most if median > 2.0 * most else median)
            if all(seconds <= limit for seconds in durations[start : start + SETTLED]):
                longest = max(longest, start)
                break
    return min(longest, LONGEST_WARM_UP)
