"""How many steps per second did the job make over time?  From the ranks' step durations, for the HTML page.

All ranks step together, so each stretch of time has the median of the ranks that made steps in it. For a large job only
some ranks are read. Steps that were repeated after a restart count too. Times are on the corrected clock
(`history.clocks`), as in the lanes of the page."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from resilience.errors import DecodeError
from resilience.facts.deadlines import STEP
from resilience.facts.identity import owner_of
from resilience.history.clocks import NodeClock, offsets_of
from resilience.run_folder.merge import files_of
from resilience.telemetry import durations
from resilience.telemetry.durations import Durations

MOST_FILES = 64  # ranks that are read
MOST_STRETCHES = 1000  # before or after the usual start of a rank; a rank that began earlier or later had a wrong clock
SHORTEST = 1.0  # seconds; a shorter last stretch is left out


class Rate(msgspec.Struct, frozen=True):
    """A stretch of time in UTC nanoseconds, and the steps per second in it."""

    begin_ns: int
    end_ns: int
    steps_a_second: float


def throughput_of(folder: Path, clocks: Iterable[NodeClock]) -> tuple[Rate, ...]:
    """Return the steps per second of a run, () if no steps are recorded. Unreadable files are left out. clocks: of the
    run's nodes."""
    paths = files_of(folder, "timings", ".hist")
    paths = paths[:: max(1, len(paths) // MOST_FILES)]
    offsets = offsets_of(clocks)
    ranks = [recorded for path in paths if (recorded := _read(path, offsets)) is not None]
    if not ranks:
        return ()
    period = max(rank.period_s for rank in ranks)
    usual = statistics.median_high(rank.began_at for rank in ranks)  # a clock that was never set is early
    ranks = [rank for rank in ranks if abs(rank.began_at - usual) <= MOST_STRETCHES * period]
    begin = min(rank.began_at for rank in ranks)
    end = max(rank.began_at + rank.seconds for rank in ranks)
    steps: defaultdict[int, list[float]] = defaultdict(list)
    for rank in ranks:
        for number, count in _steps_by_stretch(rank, begin, period).items():
            steps[number].append(count)
    rates = []
    for number in range(min(2 * MOST_STRETCHES, max(steps, default=-1)) + 1):  # a damaged file may hold any number
        since, until = begin + number * period, min(end, begin + (number + 1) * period)
        if until - since >= SHORTEST:
            rate = statistics.median(steps[number]) / (until - since) if number in steps else 0.0
            rates.append(Rate(round(since * 1e9), round(until * 1e9), rate))
    return tuple(rates)


def _read(path: Path, offsets: Mapping[str, int]) -> Durations | None:
    """Return a rank's durations on the corrected clock; None without steps."""
    try:
        recorded = durations.read_histograms(path)
    except (OSError, DecodeError):
        return None  # incomplete, or of another version
    if STEP not in recorded.deadlines:
        return None
    offset_s = offsets.get(owner_of(path.stem).node, 0) / 1e9
    return msgspec.structs.replace(recorded, began_at=recorded.began_at - offset_s)


def _steps_by_stretch(rank: Durations, begin: float, period: float) -> dict[int, float]:
    """Return a rank's steps by stretch. A period of the rank that overlaps two stretches is divided in proportion."""
    steps: defaultdict[int, float] = defaultdict(float)
    for number, steps_of_period in rank.deadlines[STEP].periods.items():
        position = (rank.began_at + number * rank.period_s - begin) / period
        length = rank.period_s / period
        first = int(position)
        first_share = min(1.0, (first + 1 - position) / length)
        steps[first] += steps_of_period.count * first_share
        if first_share < 1.0:
            steps[first + 1] += steps_of_period.count * (1.0 - first_share)
    return dict(steps)
