"""How close do sections come to their limits?  Gauges from the limits in rank snapshots, and from timings.

A limit is that of the strictest rank of the node. Its used share considers sections that ended within the last RECENT
to twice RECENT seconds, and sections open now: so one slow section at the start does not show forever. A learned limit
counts as stale from the monitor's record of it until the next attempt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from resilience.core import events
from resilience.core.records import Record
from resilience.telemetry.rank_snapshot import Allowed, RankSnapshot
from resilience.telemetry.timings import HEARTBEAT, Histogram, Timings, upper_bound

RECENT = 600.0  # seconds

Values = dict[str, dict[tuple[str, ...], float]]
NOTHING = Histogram()


class LimitMetrics:
    """The state of limits on one node."""

    def __init__(self) -> None:
        self._timings = Timings()
        self._before = Timings()  # sections that had ended when the recent period began
        self._next = Timings()  # the next value of `_before`
        self._turned_at: float | None = None
        self._began = math.inf  # the node's first record
        self._stale: set[str] = set()
        self._attempt = 0

    def take(self, record: Record) -> None:
        """Add a record."""
        self._began = min(self._began, record.mono_ns / 1e9)
        if record.origin.attempt > self._attempt:
            self._attempt = record.origin.attempt
            self._stale.clear()
        if isinstance(record.event, events.TimeoutsStale) and record.origin.attempt == self._attempt:
            self._stale.add(record.event.deadline)

    def take_timings(self, timings: Timings, now: float) -> None:
        """Replace the recorded durations. now: seconds on this host's monotonic clock.

        Of the first ones, nobody knows when the sections ended. An exporter that takes over later than RECENT seconds
        after the beginning counts none of them as recent."""
        if self._turned_at is None:
            self._turned_at = now
            if now - self._began > RECENT:
                self._before = self._next = timings
        elif now - self._turned_at >= RECENT:
            self._turned_at = now
            self._before, self._next = self._next, self._timings
        self._timings = timings

    def values(self, shown: Mapping[int, RankSnapshot], now: float | None, label: Callable[[str], str]) -> Values:
        """Return all values. shown: snapshots by rank. now: as above, None in a replay. label: names a section."""
        strictest: dict[str, Allowed] = {}
        used = {name: self._largest(name) for name in self._timings.sections}
        for snapshot in shown.values():
            for limit in snapshot.limits:
                if limit.name not in strictest or limit.seconds < strictest[limit.name].seconds:
                    strictest[limit.name] = limit
            for section in snapshot.sections:
                if now is not None:
                    used[section.name] = max(used.get(section.name, 0.0), snapshot.open_for(section, now))
        timeouts: dict[tuple[str, ...], float] = {}
        heartbeats: dict[tuple[str, ...], float] = {}
        ratios: dict[tuple[str, ...], float] = {}
        for name, limit in strictest.items():
            source = "calibrated" if limit.is_learned else "config"
            if name == HEARTBEAT:
                heartbeats[(source,)] = limit.seconds
                continue
            key = label(name)
            timeouts[key, source] = min(timeouts.get((key, source), limit.seconds), limit.seconds)
            if name in used and limit.seconds > 0:
                ratios[(key,)] = max(ratios.get((key,), 0.0), used[name] / limit.seconds)
        return {
            "resilience_section_timeout_seconds": timeouts,
            "resilience_heartbeat_timeout_seconds": heartbeats,
            "resilience_timeout_headroom_ratio": ratios,
            "resilience_calibration_stale": {(label(name),): 1 for name in self._stale},
        }

    def _largest(self, name: str) -> float:
        """Return the largest recent duration of a section in seconds, accurate to 1 %."""
        present, earlier = self._timings.sections[name], self._before.sections.get(name, NOTHING)
        grown_buckets = [number for number, count in present.buckets.items() if count > earlier.buckets.get(number, 0)]
        return min(upper_bound(max(grown_buckets)), present.max) if grown_buckets else 0.0
