"""How long did sections take, and which limits held?  All ranks' histograms added up, for the report."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from resilience.errors import DecodeError
from resilience.telemetry import durations, signs, timings
from resilience.telemetry.timings import HEARTBEAT, Histogram, upper_bound

BIN = 20  # buckets of a file that are one here
_WRITING = re.compile(r"checkpoint|ckpt|save", re.IGNORECASE)


class Section(msgspec.Struct, frozen=True):
    """One section over all ranks, or the gaps between heartbeats under the name "". Durations in seconds, to 1 %.

    failed: times that an exception left it; ranks: that went through it. bins: (upper end, how many), ends 22 % apart.
    limit_s: the shortest one that a rank had in the end, None if none is known."""

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


def sections_of(folder: Path) -> tuple[Section, ...]:
    """Return the sections of a run, by name. Files that cannot be read are left out."""
    total = timings.Timings()
    ranks: dict[str, int] = {}
    for path in sorted((folder / "timings").glob("*.hist")):
        try:
            of_rank = durations.read_histograms(path).timings()
        except (OSError, DecodeError):
            continue  # half written, or of another version
        total.merge(of_rank)
        for name in of_rank.sections.keys() | of_rank.failed.keys():
            ranks[name] = ranks.get(name, 0) + 1
    limits: dict[str, float] = {}
    for sign in signs.read_all(folder).values():
        for limit in sign.limits:
            limits[limit.name] = min(limit.seconds, limits.get(limit.name, limit.seconds))
    names = sorted(total.sections.keys() | total.failed.keys(), key=lambda name: (name == HEARTBEAT, name))
    return tuple(_section(name, total, ranks[name], limits.get(name)) for name in names)


def _section(name: str, total: timings.Timings, ranks: int, limit_s: float | None) -> Section:
    seen = total.sections.get(name, Histogram())
    bins: dict[int, int] = {}
    for number, count in seen.buckets.items():
        end = -(-number // BIN) * BIN
        bins[end] = bins.get(end, 0) + count
    return Section(
        name,
        seen.count,
        total.failed.get(name, Histogram()).count,
        ranks,
        seen.sum,
        _quantile(seen, 0.5),
        _quantile(seen, 0.95),
        _quantile(seen, 0.99),
        seen.max,
        tuple((upper_bound(end), count) for end, count in sorted(bins.items())),
        limit_s,
    )


def _quantile(seen: Histogram, share: float) -> float:
    left = seen.count * share
    for number in sorted(seen.buckets):
        left -= seen.buckets[number]
        if left <= 0:
            return min(upper_bound(number), seen.max)
    return seen.max


def write_s(sections: tuple[Section, ...]) -> float | None:
    """Return what writing a checkpoint takes, by the sections that are named after it; None if there are none."""
    found = (each for each in sections if each.count and _WRITING.search(each.name))
    return max((each.sum_s / each.count for each in found), default=None)
