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
from resilience.core import events
from resilience.core.records import Record
from resilience.history.cycles import Launches, restarts_of


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


class Spans:
    """When each attempt began, was at work and ended, by UTC nanoseconds."""

    def __init__(self) -> None:
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.entered: dict[int, int] = {}
        self.started: dict[int, int] = {}

    def take(self, record: Record) -> None:
        """Add what a record says; order does not matter."""
        attempt, at = record.origin.attempt, record.wall_ns
        if at < self.first.get(attempt, at + 1):
            self.first[attempt] = at
        if at > self.last.get(attempt, at - 1):
            self.last[attempt] = at
        began = _entered(record)
        if began is not None:
            self.entered[attempt] = min(began, self.entered.get(attempt, began))
        if isinstance(record.event, events.CyclePhaseEnded) and record.event.phase == "run":
            at -= round(record.event.duration_s * 1e9)
            self.started[attempt] = min(at, self.started.get(attempt, at))


def times(spans: Spans, incidents: Sequence[Incident], launches: Launches) -> Times:
    """Return where the time of a job went."""
    first, last = spans.first, spans.last
    entered = spans.started | spans.entered  # of programs that show nothing only the start is known
    total = sum(last[attempt] - first[attempt] for attempt in first) / 1e9
    startup = sum(entered.get(attempt, last[attempt]) - first[attempt] for attempt in first) / 1e9
    hang = sum(incident.cost.hang_s or 0.0 for incident in incidents)
    rework = sum(incident.cost.rework_s or 0.0 for incident in incidents)
    restart = sum(incident.cost.restart_s or 0.0 for incident in incidents) + _wished(launches, incidents)
    productive = max(0.0, total - startup - hang - rework - restart)
    return Times(total, productive, startup, restart, hang, rework)


def _entered(record: Record) -> int | None:
    """When a rank is at work, if this record says so, in UTC nanoseconds."""
    match record.event:
        case events.StageStarted(stage="run"):
            return record.wall_ns
        case events.WorkerProgressed(ago_s=ago):
            return record.wall_ns - round(ago * 1e9)
    return None


def _wished(launches: Launches, incidents: Sequence[Incident]) -> float:
    """Seconds of new cycles that are no incident's."""
    told = {(incident.attempt, incident.cycle) for incident in incidents if incident.layer == "launcher"}
    total = 0.0
    for place, later in itertools.pairwise(launches.places):
        if place not in told and place[0] == later[0]:
            parts, following = launches.parts(place), launches.parts(later)
            away = [
                restart.duration_s
                for node in parts.keys() & following.keys()
                for restart in restarts_of(parts[node], following[node])
            ]
            total += max(away, default=0.0)
    return total
