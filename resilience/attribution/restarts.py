"""How many restarts did a job have, and how long did they take?

Counts the restarts of the job, and each rank that came back, each time."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict

import msgspec

from resilience.attribution.symptoms import is_end
from resilience.history.completeness import WHOLE, Completeness
from resilience.history.history import History
from resilience.history.iterations import Iteration
from resilience.history.phases import Layer, Place, RankRestart


class RestartTimes(msgspec.Struct, frozen=True):
    """The restarts of one layer that are over. restarts: of the job, without restarts in place that the launcher undid.
    ranks: one for each rank and restart; undone: those of them that the launcher undid. All may be too low or too high
    if records are missing. median_s, p95_s, max_s: from the detection of the fault to the rank's first progress; p95_s:
    the least duration that 95 % do not exceed. None if too many records are missing."""

    layer: Layer
    restarts: int
    ranks: int
    median_s: float | None
    p95_s: float | None
    max_s: float | None
    undone: int = 0


def restart_times(history: History, completeness: Completeness = WHOLE) -> tuple[RestartTimes, ...]:
    """Return the restarts in place, then those by the launcher; a layer without any is left out. completeness: of the
    records."""
    by_layer: defaultdict[Layer, list[RankRestart]] = defaultdict(list)
    for restart in history.restarts():
        by_layer[restart.layer].append(restart)
    return tuple(_times(history, layer, by_layer[layer], completeness.is_enough) for layer in sorted(by_layer))


def is_undone(iteration: Iteration, mover: int | None) -> bool:
    """Return True if the launcher restarted, or ended the job, for the death that interrupted this iteration. A restart
    in place may have followed: the Wrapper does not know yet what the launcher decides. mover: the rank whose failure
    ended the iteration's cycle."""
    return any(record.rank == mover and is_end(record) for record in iteration.records)


def _times(history: History, layer: Layer, restarts: list[RankRestart], has_durations: bool) -> RestartTimes:
    ascending = sorted(restart.duration_s for restart in restarts)
    places = Counter(restart.place for restart in restarts)
    in_place: list[Place] = [place for place in places if len(place) == 4]
    movers = {cycle: history.cycles.mover(cycle) for cycle in {place[:2] for place in in_place}}
    undone = {p: places[p] for p in in_place if is_undone(history.iterations[p], movers[p[:2]])}
    of_job, ranks, ranks_undone = len(places) - len(undone), len(ascending), sum(undone.values())
    if not has_durations:
        return RestartTimes(layer, of_job, ranks, None, None, None, ranks_undone)
    p95_s = ascending[math.ceil(0.95 * ranks) - 1]
    return RestartTimes(layer, of_job, ranks, statistics.median(ascending), p95_s, ascending[-1], ranks_undone)
