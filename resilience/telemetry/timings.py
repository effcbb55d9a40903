"""How long do sections and heartbeats take?  Sparse histograms that can be merged.

Buckets grow by 1 % from 1 µs to 1e6 s; count, sum and maximum are exact. Merging adds counts. `telemetry.durations`
reads and writes the files."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

RATIO = 1.01
SMALLEST = 1e-6  # seconds: upper bound of bucket 0
LARGEST_BUCKET = 2800
_LOG_RATIO = math.log(RATIO)
MOST_COUNTED = 10**12  # one occurrence each microsecond for 11 days; a file with a larger count is damaged
MOST_SECONDS = 1e15  # of a duration or of a sum; likewise
HEARTBEAT = ""  # the section name for gaps between heartbeats


Bucket = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_BUCKET)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNTED)]
Duration = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]


class Histogram(msgspec.Struct):
    """Durations in seconds. buckets: bucket number -> count; bucket i ends at SMALLEST * RATIO**i."""

    buckets: dict[Bucket, Count] = {}
    count: Count = 0
    sum: Duration = 0.0
    max: Duration = 0.0

    def add(self, duration: float) -> None:
        number = bucket(duration)
        self.buckets[number] = self.buckets.get(number, 0) + 1
        self.count += 1
        self.sum += duration
        self.max = max(self.max, duration)

    def merge(self, other: Histogram) -> None:
        for number, count in other.buckets.items():
            self.buckets[number] = self.buckets.get(number, 0) + count
        self.count += other.count
        self.sum += other.sum
        self.max = max(self.max, other.max)


def bucket(duration: float) -> int:
    """Return the number of the bucket that a duration falls into."""
    number = 0 if duration <= SMALLEST else math.ceil(math.log(duration / SMALLEST) / _LOG_RATIO)
    return min(number, LARGEST_BUCKET)


def upper_bound(number: int) -> float:
    """Return the upper bound of a bucket, in seconds."""
    return SMALLEST * RATIO**number


class Timings(msgspec.Struct):
    """The histograms of one rank or of several, by section; HEARTBEAT holds the gaps between heartbeats.

    failed: of sections that an exception left; their durations say little about complete ones."""

    sections: dict[str, Histogram] = {}
    failed: dict[str, Histogram] = {}

    def merge(self, other: Timings) -> None:
        for name, histogram in other.sections.items():
            self.sections.setdefault(name, Histogram()).merge(histogram)
        for name, histogram in other.failed.items():
            self.failed.setdefault(name, Histogram()).merge(histogram)
