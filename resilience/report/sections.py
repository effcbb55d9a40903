"""How long did sections take, and which limits applied?  The sum of all ranks' histograms, for the report."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from resilience.run_folder.timings import TimingsReader
from resilience.telemetry import rank_snapshot, timings
from resilience.telemetry.timings import HEARTBEAT, Histogram, upper_bound

BIN = 20  # buckets of a file that are combined here
_WRITING = re.compile(r"checkpoint|ckpt|save", re.IGNORECASE)


class SectionSummary(msgspec.Struct, frozen=True):
    """One section over all ranks; the name "" stands for heartbeat intervals. Durations in seconds, within 1 %.

    failed: number of exits by an exception; ranks: number of ranks that entered it. bins: (upper end, count), ends 22 %
    apart. limit_s: the shortest last limit of a rank, None if unknown."""

    name: str
    count: int
    failed: int
    ranks: int
    sum_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float
    bins: tuple[tuple[float, int], ...]
    limit_s: float | None = None


def sections_of(folder: Path, reader: TimingsReader | None = None) -> tuple[SectionSummary, ...]:
    """Return the sections of a run, by name. reader: of the run's timings; notes afterwards what could not be read."""
    total = timings.Timings()
    ranks: dict[str, int] = {}
    reader = reader or TimingsReader(folder)
    for _, recorded in reader.histograms:
        rank_timings = recorded.timings()
        total.merge(rank_timings)
        for name in rank_timings.sections.keys() | rank_timings.failed.keys():
            ranks[name] = ranks.get(name, 0) + 1
    limits: dict[str, float] = {}
    for snapshot in rank_snapshot.read_all(folder, note=reader.note).values():
        for limit in snapshot.limits:
            limits[limit.name] = min(limit.seconds, limits.get(limit.name, limit.seconds))
    names = sorted(total.sections.keys() | total.failed.keys(), key=lambda name: (name == HEARTBEAT, name))
    return tuple(_section(name, total, ranks[name], limits.get(name)) for name in names)


def _section(name: str, total: timings.Timings, ranks: int, limit_s: float | None) -> SectionSummary:
    histogram = total.sections.get(name, Histogram())
    bins: dict[int, int] = {}
    for number, count in histogram.buckets.items():
        end = -(-number // BIN) * BIN
        bins[end] = bins.get(end, 0) + count
    return SectionSummary(
        name,
        histogram.count,
        total.failed.get(name, Histogram()).count,
        ranks,
        histogram.sum,
        _quantile(histogram, 0.5),
        _quantile(histogram, 0.95),
        _quantile(histogram, 0.99),
        histogram.max,
        tuple((upper_bound(end), count) for end, count in sorted(bins.items())),
        limit_s,
    )


def _quantile(histogram: Histogram, share: float) -> float:
    remaining = histogram.count * share
    for number in sorted(histogram.buckets):
        remaining -= histogram.buckets[number]
        if remaining <= 0:
            return min(upper_bound(number), histogram.max)
    return histogram.max


def write_s(sections: tuple[SectionSummary, ...]) -> float | None:
    """Return the mean seconds to write a checkpoint, from sections with such a name; None if there are none."""
    writing = (section for section in sections if section.count and _WRITING.search(section.name))
    return max((section.sum_s / section.count for section in writing), default=None)
