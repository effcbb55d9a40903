"""Which durations does a fit need?  Those of all runs of one deadline, in one form.

The fit takes the durations by size, and a few facts about their order: the median and the maximum of each run, the
drift, and where the largest ones lie. So histograms serve as well as single values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from resilience.calibration.episodes import RUN, LargestDurations


class Pool(msgspec.Struct, frozen=True):
    """The observed durations of one deadline, in the form that the fit needs.

    descending: (seconds, count), largest first. run_medians, run_maxima: one value per run. drift: log of the median of
    the last third divided by that of the first, median over runs, 0 if unknown. first_half_max: the largest duration in
    the first half of the exposure. tops: the largest durations with their positions, as far as known."""

    descending: tuple[tuple[float, int], ...]
    run_medians: tuple[float, ...]
    drift: float
    first_half_max: float
    tops: LargestDurations = LargestDurations()
    run_maxima: tuple[float, ...] = ()

    @property
    def n(self) -> int:
        """Return the number of durations."""
        return sum(count for _, count in self.descending)

    @property
    def longest(self) -> float:
        """Return the longest duration, 0 if there is none."""
        return self.descending[0][0] if self.descending else 0.0


def pooled(durations_by_run: Sequence[Sequence[float]], tops: LargestDurations | None = None) -> Pool:
    """Return the durations of runs in the form that the fit needs. tops: by default computed for runs without a gap."""
    runs = [run for run in durations_by_run if len(run)]
    durations = [seconds for run in runs for seconds in run]
    half = durations[: max(1, len(durations) // 2)]
    counts: dict[float, int] = {}
    for seconds in durations:
        counts[seconds] = counts.get(seconds, 0) + 1
    drifts = sorted(drift(run) for run in runs if len(run) >= 30)
    return Pool(
        descending=tuple(sorted(counts.items(), reverse=True)),
        run_medians=tuple(_median(run) for run in runs),
        drift=drifts[len(drifts) // 2] if drifts else 0.0,
        first_half_max=max(half, default=0.0),
        tops=LargestDurations.of((s, number * RUN + i) for number, run in enumerate(runs) for i, s in enumerate(run))
        if tops is None
        else tops,
        run_maxima=tuple(max(run) for run in runs),
    )


def drift(run: Sequence[float]) -> float:
    """Return the log of the median of the last third divided by that of the first."""
    third = len(run) // 3
    return math.log(_median(run[-third:]) / _median(run[:third]))


def _median(run: Sequence[float]) -> float:
    ordered = sorted(run)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
