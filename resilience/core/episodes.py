"""How many independent events are behind the largest durations?

Slow occurrences come in episodes: a congested network slows twenty steps in a row. Those twenty are one event. A fit
that counts them as twenty takes a slow phase that came once for one that is well known. Occurrences above a threshold
are one event here if they lie much closer together than chance would place them. The distance depends on the mean
distance of such occurrences, so a phase that recurs every tenth step is not taken for one long episode.
Source: the runs estimator of the extremal index (Smith and Weissman, 1994)."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import msgspec

MOST = 5_000  # of the largest durations that are kept with their places
CLOSE = 0.05  # of the mean distance: nearer occurrences are of one episode; chance puts 5 % so near to each other
START = 1 << 32  # places between two starts of a run
RUN = START << 16  # and between two runs


class Tops(msgspec.Struct, frozen=True):
    """The largest durations and where they occurred. seconds: smallest first. places: of each one; occurrences that
    follow one another differ by 1, those of several starts by START at least, those of several runs by RUN. together:
    how many durations one event brings at most where no place is known, such as one of each rank."""

    seconds: tuple[float, ...] = ()
    places: tuple[int, ...] = ()
    together: int = 1

    @classmethod
    def of(cls, occurrences: Iterable[tuple[float, int]]) -> Tops:
        """Keep the largest of these (seconds, place)."""
        kept = sorted(heapq.nlargest(MOST, occurrences))
        return cls(tuple(seconds for seconds, _ in kept), tuple(place for _, place in kept))

    def between(self, low: float, high: float) -> Sequence[int]:
        """Return the places of the durations from low to high that are known."""
        return self.places[bisect_left(self.seconds, low) : bisect_right(self.seconds, high)]

    def events(self, low: float, high: float, count: int, n: int) -> float:
        """Return how many independent events the `count` durations from low to high are.

        n: occurrences in all. Durations without a place are as clustered as the others."""
        places = self.between(low, high)
        if not places or count <= 0:
            return max(1.0, count / self.together)
        seen = episodes(places, CLOSE * n / len(places))
        # Chance alone takes exp(-CLOSE) of independent events for separate ones.
        return max(1.0, min(1.0, seen * math.exp(CLOSE) / len(places)) * count) if seen > 1 else 1.0


def episodes(places: Sequence[int], apart: float) -> int:
    """Return the number of groups of places whose neighbours are at most `apart` from each other."""
    ordered = sorted(places)
    return len(ordered) and 1 + sum(after - before > apart for before, after in itertools.pairwise(ordered))
