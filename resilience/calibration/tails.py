"""How far do the largest durations reach?  Modes, and a bound on the tail of each one.

A mode is a cluster of durations, separate from all others. Its largest values bound its tail. Independent events are
counted, not durations (`calibration.episodes`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from resilience.calibration.episodes import MOST, LargestDurations
from resilience.calibration.quantiles import chi2, poisson_at_most

GAP = math.log(1.15)  # smallest gap between two modes
SMALLEST_MODE, MOST_MODES = 5, 4
TAIL_SIZES = (10, 25, 50, 100, 200)  # how many of the largest values bound a mode's tail
INCREDIBLE = 1e-3  # probability below which a tail disagrees with the values above it
FEWEST_EVENTS = 3  # events needed to know a mode
CLUSTERED = 2.0  # durations per event from which they count as episodes
_LARGEST_EXPONENT = 700.0  # math.exp raises an error from 710 on
UNKNOWN = LargestDurations()


def split(descending: Sequence[tuple[float, int]], tops: LargestDurations = UNKNOWN) -> list[list[tuple[float, int]]]:
    """Return the modes, highest first.

    From the top, a gap separates two modes if it is wider than 15 % and wider than the spread of the group above it,
    and that group has at least 5 events. A smooth heavy tail never meets all these conditions."""
    n = count_of(descending)
    modes: list[list[tuple[float, int]]] = []
    group: list[tuple[float, int]] = []
    members = 0
    for value, count in descending:
        if group and len(modes) < MOST_MODES - 1 and members >= SMALLEST_MODE:
            gap = math.log(group[-1][0] / value)
            is_wide = gap > GAP and gap > math.log(group[0][0] / group[-1][0])
            if is_wide and tops.events(group[-1][0], group[0][0], members, n) >= SMALLEST_MODE:
                modes.append(group)
                group, members = [], 0
        group.append((value, count))
        members += count
    return [*modes, group]


def top_group(descending: Sequence[tuple[float, int]], tops: LargestDurations, n: int) -> tuple[int, float] | None:
    """Return the number of durations and of events above the first gap that would separate a mode, None without one."""
    top, members = descending[0][0], 0
    for (value, count), (below, _) in itertools.pairwise(descending):
        members += count
        gap = math.log(value / below)
        if members >= SMALLEST_MODE and gap > GAP and gap > math.log(top / value):
            return members, tops.events(value, top, members, n)
    return None


class Tail(msgspec.Struct, frozen=True):
    """An exponential bound on log durations above u. k values in so many independent events exceed it, on average by h;
    xi is the upper confidence bound of h, `most` that of k. Source: Hill (1975), with the upper confidence bound of an
    exponential mean, 2 events h / chi2."""

    k: int
    u: float
    h: float
    xi: float
    events: float
    most: float

    def level(self, p: float, n: int) -> float:
        """Return the log duration that is exceeded with probability p."""
        return self.u + self.xi * math.log(self.most / (n * p))

    def probability(self, s: float, n: int) -> float:
        """Return the probability that a log duration of s is exceeded."""
        if self.xi <= 0.0:
            return 0.0 if s >= self.u else self.most / n
        return self.most / n * exp((self.u - s) / self.xi)


def tails_of(mode: Sequence[tuple[float, int]], confidence: float, tops: LargestDurations, n: int) -> list[Tail]:
    """Return bounds on a mode's tail from its 10, 25 … largest values. Few values show a tail that starts near the top.
    A bound needs FEWEST_EVENTS, so more values are used until there are as many."""
    largest = list(itertools.islice(_one_by_one(mode), MOST))
    size = len(largest) - 1
    if size < 1:
        return []
    sums = list(itertools.accumulate(map(math.log, largest)))
    tails: dict[int, Tail] = {}
    for wanted in TAIL_SIZES:
        k = min(wanted, size)
        while (events := tops.events(largest[k], largest[0], k, n)) < FEWEST_EVENTS and k < size:
            k = min(size, math.ceil(1.2 * k))
        if k < size or not tails:
            u, twice = math.log(largest[k]), 2.0 * events
            # Two joint bounds need a higher confidence each. This matters if few events stand for many values.
            bound = (1.0 + confidence) / 2.0 if k >= CLUSTERED * events else confidence
            h = sums[k - 1] / k - u
            xi = h * twice / chi2(1.0 - bound, twice)
            tails[k] = Tail(k, u, h, xi, events, most=k * chi2(bound, twice + 2.0) / twice)
    return list(tails.values())


def _one_by_one(values: Iterable[tuple[float, int]]) -> Iterator[float]:
    return itertools.chain.from_iterable(itertools.repeat(value, count) for value, count in values)


def credible(tails: Sequence[Tail]) -> list[Tail]:
    """Return the tails without those that reach below their mode: these predict far more large values than exist.

    A tail of the k largest values predicts how many lie above the threshold of each smaller tail. If there are
    significantly fewer, its lowest values belong to another mode or to the body, and say nothing about the top."""
    kept = []
    for tail in tails:
        predictions = [
            (smaller.events, tail.events * math.exp(-(smaller.u - tail.u) / tail.h))
            for smaller in tails
            if smaller.k < tail.k and tail.h > 0
        ]
        if all(poisson_at_most(math.ceil(observed), expected) >= INCREDIBLE for observed, expected in predictions):
            kept.append(tail)
    return kept


def exp(exponent: float) -> float:
    """Return e to this power, at most 1e304: as long a duration, or as many occurrences, as anything may need."""
    return math.exp(min(exponent, _LARGEST_EXPONENT))


def count_of(values: Sequence[tuple[float, int]]) -> int:
    return sum(count for _, count in values)


def quantile(descending: Sequence[tuple[float, int]], q: float) -> float:
    """Return the value that a share q of all values does not exceed."""
    above = count_of(descending) * (1.0 - q)
    for value, count in descending:
        above -= count
        if above < 0:
            return value
    return descending[-1][0]
