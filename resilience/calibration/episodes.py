"""How many independent events caused the largest durations?

Slow occurrences come in episodes: a congested network slows twenty steps in a row. Those twenty are one event. A fit
that counts them as twenty mistakes a slow phase that occurred once for a well-known one. Here, occurrences above a
threshold are one event if they lie much closer together than chance would place them. The distance depends on the mean
distance of such occurrences, so a phase that recurs every tenth step does not count as one long episode.
Source: the runs estimator of the extremal index (Smith and Weissman, 1994)."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import msgspec

MOST = 5_000  # largest durations that are kept with their places
CLOSE = 0.05  # of the mean distance: closer occurrences belong to one episode; chance puts 5 % that close
START = 1 << 32  # places between two starts of a run
RUN = START << 16  # and between two runs


class LargestDurations(msgspec.Struct, frozen=True):
    """The largest durations and their places. seconds: smallest first. places: one per duration; consecutive
    occurrences differ by 1, occurrences of different starts by at least START, of different runs by at least RUN.
    most_per_event: durations that one event causes at most, if no place is known, such as one per rank."""

    seconds: tuple[float, ...] = ()
    places: tuple[int, ...] = ()
    most_per_event: int = 1

    @classmethod
    def of(cls, occurrences: Iterable[tuple[float, int]]) -> LargestDurations:
        """Build from (seconds, place) pairs; only the largest are kept."""
        kept = sorted(heapq.nlargest(MOST, occurrences))
        return cls(tuple(seconds for seconds, _ in kept), tuple(place for _, place in kept))

    def between(self, low: float, high: float) -> Sequence[int]:
        """Return the known places of the durations from low to high."""
        return self.places[bisect_left(self.seconds, low) : bisect_right(self.seconds, high)]

    def events(self, low: float, high: float, count: int, n: int) -> float:
        """Return how many independent events the `count` durations from low to high are.

        n: occurrences in all. Durations without a place count as equally clustered."""
        places = self.between(low, high)
        if not places or count <= 0:
            return max(1.0, count / self.most_per_event)
        groups = episodes(places, CLOSE * n / len(places))
        # By chance, only a share of exp(-CLOSE) of independent events appears separate.
        return max(1.0, min(1.0, groups * math.exp(CLOSE) / len(places)) * count) if groups > 1 else 1.0


def episodes(places: Sequence[int], apart: float) -> int:
    """Return the number of groups of places whose neighbours are at most `apart` from each other."""
    ordered = sorted(places)
    return len(ordered) and 1 + sum(after - before > apart for before, after in itertools.pairwise(ordered))
