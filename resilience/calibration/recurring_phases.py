"""At which occurrences is a job known to be slow?  Positions that recur in every run.

For example, a job evaluates at step 1000, 2000 and 3000 of every run. The limit of such a phase is long, and without
known positions it would be the limit of every step. Occurrences count from a cold start. A position is known if all
runs that reached it, at least two, are slow there. Three runs from the beginning also prove that there is no such
position. Beyond the second longest run nothing is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from resilience.facts.phases import Phases

SLOW = 1.5  # times the median: an occurrence this long is slow
FEWEST_RUNS = 2  # that show a phase
ENOUGH_RUNS = 3  # that show that there is none, and that few durations are enough as far as they came
BEGINNING = 1  # the highest number of the first step of a job that did not continue from a checkpoint
MOST = 2_000  # positions


class Course(msgspec.Struct, frozen=True):
    """One run from its cold start. slow: seconds by position, for all occurrences that may be slow. median: seconds.
    reach: number of occurrences. is_from_beginning: it did not continue from a checkpoint."""

    slow: Mapping[int, float]
    median: float
    reach: int
    is_from_beginning: bool = True


def recurring(runs: Sequence[Course]) -> Phases | None:
    """Return the phases on which all runs agree; None if too few runs show whether there are any."""
    if len(runs) < FEWEST_RUNS:
        return None
    reaches = sorted((run.reach for run in runs), reverse=True)
    counts = Counter(
        number for run in runs for number, seconds in run.slow.items() if seconds >= SLOW * run.median > 0.0
    )
    until = reaches[FEWEST_RUNS - 1]
    positions = tuple(
        sorted(
            number
            for number, count in counts.items()
            if number < until and count == sum(reach > number for reach in reaches)
        )
    )
    fewest = 0 if len(runs) >= ENOUGH_RUNS and all(run.is_from_beginning for run in runs) else 1
    return Phases(positions, until) if fewest <= len(positions) <= MOST else None
