"""How many restarts did a job have, and how long did they take?

Counts the restarts of the job, and each rank that came back, each time."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict

import msgspec

from resilience.history.completeness import WHOLE, Completeness
from resilience.history.history import History
from resilience.history.phases import Layer, RankRestart


class RestartTimes(msgspec.Struct, frozen=True):
    """The restarts of one layer that are over. restarts: of the job. ranks: one for each rank and restart. Both are
    lower bounds if records are missing. median_s, p95_s, max_s: from the detection of the fault to the rank's first
    progress; p95_s: the least duration that 95 % do not exceed. None if too many records are missing."""

    layer: Layer
    restarts: int
    ranks: int
    median_s: float | None
    p95_s: float | None
    max_s: float | None


def restart_times(history: History, completeness: Completeness = WHOLE) -> tuple[RestartTimes, ...]:
    """Return the restarts in place, then those by the launcher; a layer without any is left out. completeness: of the
    records."""
    by_layer: defaultdict[Layer, list[RankRestart]] = defaultdict(list)
    for restart in history.restarts():
        by_layer[restart.layer].append(restart)
    has_durations = completeness.is_enough
    return tuple(_times(layer, restarts, has_durations) for layer, restarts in sorted(by_layer.items()))


def _times(layer: Layer, restarts: list[RankRestart], has_durations: bool) -> RestartTimes:
    ascending = sorted(restart.duration_s for restart in restarts)
    of_job = len({restart.place for restart in restarts})
    ranks = len(ascending)
    if not has_durations:
        return RestartTimes(layer, of_job, ranks, None, None, None)
    p95_s = ascending[math.ceil(0.95 * ranks) - 1]
    return RestartTimes(layer, of_job, ranks, statistics.median(ascending), p95_s, ascending[-1])
