"""How close do sections come to their limits?  Gauges from the limits in rank snapshots, and from recorded durations.

The limit that is shown is that of the strictest rank of the node. The used share compares each rank with its own limits
and is the largest of all ranks. It considers sections that ended within the last RECENT to twice RECENT seconds, and
sections open now: so one slow section at the start does not show forever. If the first occurrences after a start have a
limit of their own, they count only while they are open. A learned limit counts as stale from the monitor's record of it
until the next attempt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from resilience.facts import events
from resilience.facts.deadlines import of_section
from resilience.facts.records import Record
from resilience.telemetry.durations import Durations, Series
from resilience.telemetry.rank_snapshot import Allowed, RankSnapshot
from resilience.telemetry.timings import HEARTBEAT, Bucket, Count, upper_bound

RECENT = 600.0  # seconds

Values = dict[str, dict[tuple[str, ...], float]]
Ranks = Mapping[int, Durations]
"""What each rank of the node has recorded, by initial rank."""


class LimitMetrics:
    """The state of limits on one node."""

    def __init__(self) -> None:
        self._ranks: Ranks = {}
        self._before: Ranks = {}  # sections that had ended when the recent period began
        self._next: Ranks = {}  # the next value of `_before`
        self._turned_at: float | None = None
        self._began = math.inf  # the node's first record
        self.stale: set[str] = set()  # sections whose learned limit disagrees with what was observed
        self._attempt = 0

    def take(self, record: Record) -> None:
        """Add a record."""
        self._began = min(self._began, record.mono_ns / 1e9)
        if record.origin.attempt > self._attempt:
            self._attempt = record.origin.attempt
            self.stale.clear()
        if isinstance(record.event, events.TimeoutsStale) and record.origin.attempt == self._attempt:
            self.stale.add(record.event.deadline)

    def take_durations(self, ranks: Ranks, now: float) -> None:
        """Replace the recorded durations. now: seconds on this host's monotonic clock.

        The first durations do not show when their sections ended. An exporter that takes over later than RECENT seconds
        after the beginning counts none of them as recent."""
        if self._turned_at is None:
            self._turned_at = now
            if now - self._began > RECENT:
                self._before = self._next = ranks
        elif now - self._turned_at >= RECENT:
            self._turned_at = now
            self._before, self._next = self._next, self._ranks
        self._ranks = ranks

    def values(self, shown: Mapping[int, RankSnapshot], label: Callable[[str], str]) -> Values:
        """Return all values. shown: snapshots by rank. label: names a section."""
        strictest: dict[str, Allowed] = {}
        for snapshot in shown.values():
            for limit in snapshot.limits:
                if limit.name not in strictest or limit.seconds < strictest[limit.name].seconds:
                    strictest[limit.name] = limit
        timeouts: dict[tuple[str, ...], float] = {}
        heartbeats: dict[tuple[str, ...], float] = {}
        for name, limit in strictest.items():
            source = "calibrated" if limit.is_learned else "config"
            if name == HEARTBEAT:
                heartbeats[(source,)] = limit.seconds
                continue
            key = label(name)
            timeouts[key, source] = min(timeouts.get((key, source), limit.seconds), limit.seconds)
        ratios: dict[tuple[str, ...], float] = {}
        for rank, snapshot in shown.items():
            for name, ratio in (*self._ended(rank, snapshot), *_open(snapshot)):
                ratios[(label(name),)] = max(ratios.get((label(name),), 0.0), ratio)
        return {
            "resilience_section_timeout_seconds": timeouts,
            "resilience_heartbeat_timeout_seconds": heartbeats,
            "resilience_timeout_headroom_ratio": ratios,
            "resilience_calibration_stale": {(label(name),): 1 for name in self.stale},
        }

    def _ended(self, rank: int, snapshot: RankSnapshot) -> Iterator[tuple[str, float]]:
        """Yield the used shares of the limits of a rank's sections that ended recently."""
        for limit in snapshot.limits:
            present = _series(self._ranks, rank, limit.name)
            if limit.name != HEARTBEAT and limit.seconds > 0 and present.total.count:
                yield limit.name, _largest(limit, present, _series(self._before, rank, limit.name)) / limit.seconds


def _open(snapshot: RankSnapshot) -> Iterator[tuple[str, float]]:
    """Yield the used shares of the limits of a rank's open sections."""
    for section in snapshot.sections:
        if section.limit_s:
            yield section.name, snapshot.open_for(section) / section.limit_s


def _series(ranks: Ranks, rank: int, section: str) -> Series:
    """Return what a rank has recorded of a section."""
    recorded = ranks[rank].deadlines.get(of_section(section)) if rank in ranks else None
    return Series() if recorded is None else recorded


def _largest(limit: Allowed, present: Series, earlier: Series) -> float:
    """Return the largest recent duration to which a limit applied, in seconds, accurate to 1 %."""
    now, before = _buckets(limit, present), _buckets(limit, earlier)
    grown_buckets = [number for number, count in now.items() if count > before.get(number, 0)]
    return min(upper_bound(max(grown_buckets)), present.total.max) if grown_buckets else 0.0


def _buckets(limit: Allowed, series: Series) -> Mapping[Bucket, Count]:
    """Return the numbers of the durations to which a limit applied, by bucket."""
    if not limit.has_first:
        return series.total.buckets
    early = series.early.buckets
    return {number: count - early.get(number, 0) for number, count in series.total.buckets.items()}
