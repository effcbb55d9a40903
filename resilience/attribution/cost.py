"""Where did the time go?  Seconds of the whole job, productive or lost, by cause.

Of each attempt: until the first rank entered its function or showed progress it started up; what incidents
cost is lost to silence, restarts and steps done again; new cycles that somebody asked for are restarts too.
The rest was productive. Its share is the effective training time ratio (ETTR). Clocks of nodes are compared
as they tell the time, which only matters where an attempt begins and ends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from resilience.attribution.incident import Incident
from resilience.history.cycles import CycleHistory, restarts_of
from resilience.history.history import History


class Times(msgspec.Struct, frozen=True):
    """Seconds of the whole job. Each second counts once, so that the causes add up to what is not productive."""

    total_s: float
    productive_s: float
    startup_s: float
    restart_s: float
    hang_s: float
    rework_s: float

    @property
    def ettr(self) -> float | None:
        """The share that was productive, None if nothing was."""
        return self.productive_s / self.total_s if self.total_s > 0 else None


def times(history: History, incidents: Sequence[Incident]) -> Times:
    """Return where the time of a job went."""
    attempts = history.attempts.values()
    total = sum(attempt.last_ns - attempt.first_ns for attempt in attempts) / 1e9
    startup = sum(attempt.began_ns - attempt.first_ns for attempt in attempts) / 1e9
    hang = sum(incident.cost.hang_s or 0.0 for incident in incidents)
    rework = sum(incident.cost.rework_s or 0.0 for incident in incidents)
    restart = sum(incident.cost.restart_s or 0.0 for incident in incidents) + _wished(history.cycles, incidents)
    productive = max(0.0, total - startup - hang - rework - restart)
    return Times(total, productive, startup, restart, hang, rework)


def _wished(cycles: CycleHistory, incidents: Sequence[Incident]) -> float:
    """Seconds of new cycles that are no incident's."""
    told = {(incident.attempt, incident.cycle) for incident in incidents if incident.layer == "launcher"}
    total = 0.0
    for place, later in itertools.pairwise(cycles.places):
        if place not in told and place[0] == later[0]:
            parts, following = cycles.parts(place), cycles.parts(later)
            away = [
                restart.duration_s
                for node in parts.keys() & following.keys()
                for restart in restarts_of(parts[node], following[node])
            ]
            total += max(away, default=0.0)
    return total
