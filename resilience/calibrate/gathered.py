"""What did all ranks of a run show of one deadline?  Collected while the ranks are read one by one.

Single values are aligned over ranks by the start that they follow, and the slowest rank's stays. Histograms are added
up, and say what the single values lack."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from resilience.calibrate.observed import ObservedCut, ObservedDeadline, StartValues, Unfinished
from resilience.calibrate.rank_files import Rank
from resilience.calibration.fitting import NEAR_TOP
from resilience.calibration.starts import LONGEST_WARM_UP
from resilience.calibration.unended import Cut
from resilience.facts.deadlines import Start
from resilience.telemetry import durations
from resilience.telemetry.timings import Histogram, bucket, upper_bound

Place = tuple[int, int, int]  # cycle and iteration of a start, and how many starts there were before with both equal


class Gathered(msgspec.Struct):
    """One deadline of a run while its ranks are read one by one. slowest: (seconds, time) by start and number since
    it. above: all longer durations are among the single values, or in missing. median: of all ranks' durations.
    longest: of all ranks, without the first FIRST_AGAIN ones after a start; 0 if there were no others.
    unnumbered: first occurrences after a start that count neither as first nor as usual ones, because no single value
    says which they are; longest_unnumbered: the longest of these in seconds."""

    deadline: str
    body: Histogram
    median: float
    longest: float
    above: float
    course: tuple[float, float, float]
    rank_medians: tuple[float, float]
    is_from_beginning: bool
    is_full: bool
    n: int = 0
    unnumbered: int = 0
    longest_unnumbered: float = 0.0
    slowest: dict[Place, dict[int, tuple[float, float]]] = {}
    hows: dict[Place, Start] = {}
    missing: dict[int, int] = {}
    cuts: dict[Place, dict[int, Unfinished]] = {}
    first_buckets: dict[int, Counter[int]] = {}

    @classmethod
    def of(cls, deadline: str, ranks: Sequence[Rank]) -> Gathered:
        """Add up the histograms of all ranks."""
        totals = [rank.total(deadline) for rank in ranks]
        body = Histogram()
        for total in totals:
            body.merge(total)
        medians = [durations.median(total) for total in totals if total.count]
        sampled = [series.total for rank in ranks for series in rank.series(deadline)]
        return cls(
            deadline,
            body,
            median=durations.median(body),
            longest=max((period.settled_max for rank in ranks for _, period in rank.periods(deadline)), default=0.0),
            above=max(
                (durations.threshold(total) if total.count > durations.FIRST else 0.0 for total in sampled), default=0.0
            ),
            course=_course([rank.periods(deadline) for rank in ranks]),
            rank_medians=(min(medians, default=0.0), max(medians, default=0.0)),
            is_from_beginning=all(rank.is_from_beginning for rank in ranks),
            is_full=any(
                file.state.left_out for rank in ranks for file in rank.files if deadline in file.state.deadlines
            ),
        )

    @property
    def usual_s(self) -> float:
        """Return the seconds beyond which an occurrence took unusually long."""
        return NEAR_TOP * max(self.median, self.longest)

    def take(self, place: Place, how: Start, value: durations.Value) -> None:
        """Keep a single value if it is the slowest rank's."""
        if value.j < LONGEST_WARM_UP:
            buckets = self.first_buckets.get(value.j)
            if buckets is None:
                buckets = self.first_buckets[value.j] = Counter()
            buckets[bucket(value.s)] += 1
        values = self.slowest.get(place)
        if values is None:
            values = self.slowest[place] = {}
        slowest_value = values.get(value.j)
        if slowest_value is None or value.s > slowest_value[0]:
            values[value.j] = (value.s, value.t)
        if how == "cold" or place not in self.hows:  # one cold rank makes the start cold for all: they wait for it
            self.hows[place] = how

    def add_cut(self, place: Place, how: Start, number: int, cut: Cut) -> None:
        """Keep what this occurrence after a start counts as, which other ranks may not have ended either."""
        self.cuts.setdefault(place, {}).setdefault(number, Unfinished()).add(cut)
        if how == "cold" or place not in self.hows:
            self.hows[place] = how

    def observed_cuts(self) -> Iterator[ObservedCut]:
        """Yield the occurrences that did not end by themselves."""
        for place, by_number in self.cuts.items():
            ended = self.slowest.get(place, {})
            for number, unfinished in by_number.items():
                ended_s = ended[number][0] if number in ended else None
                for cut in unfinished.counted(ended_s, self.median):
                    yield ObservedCut(cut, number, self.hows[place])

    def add_rank(self, total: Histogram, large: Mapping[int, int], unnumbered: Mapping[int, int]) -> None:
        """Count what a rank's histogram has beyond its single values. large: count by bucket of its durations above
        `above`. unnumbered: of its first occurrences after a start."""
        left_out = sum(unnumbered.values())
        self.n = max(self.n, total.count - left_out)
        for number, count in large.items():
            if (lost := count - unnumbered.get(number, 0)) > 0:
                self.missing[number] = max(self.missing.get(number, 0), lost)
        if left_out:
            self.unnumbered = max(self.unnumbered, left_out)
            self.longest_unnumbered = max(self.longest_unnumbered, min(upper_bound(max(unnumbered)), total.max))
            self.body.count -= left_out
            for number, count in unnumbered.items():
                self.body.buckets[number] -= count

    def observed(self) -> ObservedDeadline:
        """Return the observations in the form that the fit needs."""
        places = sorted(self.slowest)
        kept = [(number, *self.slowest[place][number]) for place in places for number in sorted(self.slowest[place])]
        half_at, settled_max, drift = self.course
        return ObservedDeadline(
            starts=[StartValues(self.hows.get(place, "cold"), _early(self.slowest[place])) for place in places],
            kept=kept,
            is_whole=len(kept) >= self.n and not self.missing and not self.unnumbered,
            above=self.above,
            missing={min(upper_bound(number), self.body.max): count for number, count in self.missing.items()},
            body=self.body,
            n=self.n,
            max_s=self.body.max,
            half_at=half_at,
            settled_max=settled_max,
            drift=drift,
            cuts=list(self.observed_cuts()),
            rank_medians=self.rank_medians,
            is_from_beginning=self.is_from_beginning,
            is_full=self.is_full,
            first_buckets=self.first_buckets,
            unnumbered=self.unnumbered,
            longest_unnumbered=self.longest_unnumbered,
        )


def _early(values: Mapping[int, tuple[float, float]]) -> dict[int, float]:
    """Return the values soon after a start in order."""
    return {number: values[number][0] for number in sorted(values) if number < durations.FIRST}


def _course(by_rank: Sequence[Sequence[tuple[float, durations.Period]]]) -> tuple[float, float, float]:
    """Return the course of durations over time, without the first ones after each start: the time when half of the
    occurrences were over (wall seconds), the maximum until then, and the drift from the first to the last third.

    by_rank: the periods of each rank in order, with their ends (wall seconds)."""
    half_at, largest = 0.0, 0.0
    drifts = []
    for periods in by_rank:
        before, total = 0, sum(period.settled for _, period in periods)
        thirds: tuple[list[tuple[float, int]], ...] = ([], [], [])
        for end, period in periods:
            if before < total / 2:
                largest = max(largest, period.settled_max)
                half_at = max(half_at, end)
            if period.median > 0.0:  # else the file is damaged
                thirds[min(2, int(3 * (before + period.settled / 2) / total))].append((period.median, period.settled))
            before += period.settled
        counts = [sum(count for _, count in third) for third in thirds]
        if min(counts[0], counts[2]) >= 10:
            first, last = (
                sum(count * math.log(median) for median, count in third) / sum(count for _, count in third)
                for third in (thirds[0], thirds[2])
            )
            drifts.append(last - first)
    return half_at, largest, sorted(drifts)[len(drifts) // 2] if drifts else 0.0
