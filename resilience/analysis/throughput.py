"""How many steps did the job make per second, over time?  From the ranks' durations of steps, for the page.

All ranks make their steps together, so a stretch of time has the median of the ranks that made any; a large job's are
those of some of its ranks. Steps that a restart made necessary again count too."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path

import msgspec

from resilience.analysis.merge import files_of
from resilience.core.deadlines import STEP
from resilience.errors import DecodeError
from resilience.telemetry import durations
from resilience.telemetry.durations import Durations

MOST_FILES = 64  # ranks that are read
SHORTEST = 1.0  # seconds of the last stretch; a shorter one says little


class Rate(msgspec.Struct, frozen=True):
    """A stretch of time in UTC nanoseconds, and the steps per second in it."""

    begin_ns: int
    end_ns: int
    steps_a_second: float


def throughput_of(folder: Path) -> tuple[Rate, ...]:
    """Return the steps per second of a run, () if no steps are on record. Files that cannot be read are left out."""
    paths = files_of(folder, "timings", ".hist")
    ranks = [found for path in paths[:: max(1, len(paths) // MOST_FILES)] if (found := _read(path)) is not None]
    if not ranks:
        return ()
    period = max(rank.period_s for rank in ranks)
    begin = min(rank.began_at for rank in ranks)
    end = max(rank.began_at + rank.seconds for rank in ranks)
    steps: defaultdict[int, list[float]] = defaultdict(list)
    for rank in ranks:
        for number, count in _counts(rank, begin, period).items():
            steps[number].append(count)
    rates = []
    for number in range(max(steps, default=-1) + 1):
        since, until = begin + number * period, min(end, begin + (number + 1) * period)
        if until - since >= SHORTEST:
            rate = statistics.median(steps[number]) / (until - since) if number in steps else 0.0
            rates.append(Rate(round(since * 1e9), round(until * 1e9), rate))
    return tuple(rates)


def _read(path: Path) -> Durations | None:
    try:
        found = durations.read_histograms(path)
    except (OSError, DecodeError):
        return None  # half written, or of another version
    return found if STEP in found.deadlines else None


def _counts(rank: Durations, begin: float, period: float) -> dict[int, float]:
    """A rank's steps by stretch; where its own stretches lie across, in proportion."""
    found: defaultdict[int, float] = defaultdict(float)
    for number, own in rank.deadlines[STEP].periods.items():
        at = (rank.began_at + number * rank.period_s - begin) / period
        length = rank.period_s / period
        first = int(at)
        inside = min(1.0, (first + 1 - at) / length)
        found[first] += own.count * inside
        if inside < 1.0:
            found[first + 1] += own.count * (1.0 - inside)
    return dict(found)
