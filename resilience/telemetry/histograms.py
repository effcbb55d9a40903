"""How are durations counted?  In the buckets of a metric's histogram, and in fine buckets for OTLP."""

from __future__ import annotations

import bisect
from typing import Any

import msgspec

from resilience.telemetry.catalogue import BY_NAME, Metric
from resilience.telemetry.timings import Histogram, upper_bound

Exemplar = tuple[str, float, float]
"""Trace id, value, UTC seconds."""


class Buckets(msgspec.Struct):
    """A histogram being filled. exemplars: by bucket."""

    counts: list[int]
    sum_ns: int = 0  # whole nanoseconds, so the order of additions does not matter
    fine: Histogram = msgspec.field(default_factory=Histogram)  # the same values, for OTLP
    exemplars: dict[int, Exemplar] = {}


def no_buckets(name: str) -> Buckets:
    """Return the empty histogram of a metric."""
    return Buckets([0] * (len(BY_NAME[name].buckets) + 1))


def copy_of(buckets: Buckets) -> Buckets:
    """Return a histogram that does not change while the other one is filled."""
    fine: Histogram = msgspec.structs.replace(buckets.fine, buckets=dict(buckets.fine.buckets))
    return Buckets(list(buckets.counts), buckets.sum_ns, fine, dict(buckets.exemplars))


def add(to: Buckets, edges: tuple[float, ...], value: float, exemplar: Exemplar | None = None) -> None:
    """Count a value, in seconds. edges: upper bounds of the buckets."""
    index = bisect.bisect_left(edges, value)
    to.counts[index] += 1
    to.sum_ns += round(value * 1e9)
    to.fine.add(value)
    if exemplar is not None:
        to.exemplars[index] = exemplar


def coarse(parts: list[Histogram], edges: tuple[float, ...]) -> Buckets:
    """Sum up fine histograms into the buckets of a metric; edges are accurate to 1 %."""
    counts = [0] * (len(edges) + 1)
    for part in parts:
        for number, count in part.buckets.items():
            counts[bisect.bisect_left(edges, upper_bound(number) / 1.005)] += count
    fine = Histogram()
    for part in parts:
        fine.merge(part)
    return Buckets(counts, round(sum(part.sum for part in parts) * 1e9), fine)


def cumulative(metric: Metric, value: Buckets) -> list[Any]:
    """Return cumulative buckets, as prometheus_client expects them."""
    from prometheus_client.samples import Exemplar

    buckets: list[Any] = []
    total = 0
    for number, count in enumerate(value.counts):
        total += count
        edge = "+Inf" if number == len(value.counts) - 1 else repr(metric.buckets[number])
        if number in value.exemplars:
            trace, measured, measured_at = value.exemplars[number]
            buckets.append((edge, total, Exemplar({"trace_id": trace}, measured, measured_at)))
        else:
            buckets.append((edge, total))
    return buckets
