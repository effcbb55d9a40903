"""What was observed of each deadline of a run, in the form that the fit needs.

Run folders and tables are read into the same form (`analysis.timings`, `analysis.tables`), so the same data give the
same limits whatever they were read from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec

from resilience.core import calibration
from resilience.core.calibration import Cut, Pool
from resilience.core.configuration import Configuration
from resilience.core.deadlines import INITIAL_HEARTBEAT, Start
from resilience.core.episodes import RUN, START, Tops
from resilience.core.phases import Course, Phases
from resilience.core.tails import quantile
from resilience.telemetry import durations
from resilience.telemetry.timings import Histogram, upper_bound


class Begun(msgspec.Struct, frozen=True):
    """The leading values after a start, in order, the slowest rank's."""

    how: Start
    values: list[float]


class Observed(msgspec.Struct):
    """One deadline in one run.

    kept: (number since the start, seconds, when) of single occurrences in order, the slowest rank's. is_whole: they are
    all there are. Else all that took longer than `above` are among them or in `missing` (seconds: how often), and body
    holds all of them, of every rank. n: occurrences in all; max_s: the longest of all. half_at, settled_max, drift: how
    durations went over time, as `_course` tells. rank_medians: the lowest and the highest of single ranks, 0 where
    unknown."""

    starts: list[Begun]
    kept: list[tuple[int, float, float]]
    is_whole: bool = True
    above: float = 0.0
    missing: dict[float, int] = {}
    body: Histogram = msgspec.field(default_factory=Histogram)
    n: int = 0
    max_s: float = 0.0
    half_at: float = 0.0
    settled_max: float = 0.0
    drift: float = 0.0
    cuts: list[Cut] = []
    rank_medians: tuple[float, float] = (0.0, 0.0)

    def series(self, first: int) -> list[float]:
        """Return the single values without each start's first occurrences."""
        return [seconds for number, seconds, _ in self.kept if number >= first]

    def placed(self, first: int, run: int) -> Iterator[tuple[float, int]]:
        """Yield (seconds, place) of the single values without each start's first occurrences. run: its number."""
        for start, number, seconds, _ in self._numbered():
            if number >= first:
                yield seconds, run * RUN + start * START + number

    def course(self, first: int) -> Course | None:
        """Return the single values after the cold start by position, None if the run did not begin with one."""
        if not self.starts or self.starts[0].how != "cold":
            return None
        cold = {number: seconds for start, number, seconds, _ in self._numbered() if start == 0}
        kept = sorted(seconds for number, seconds in cold.items() if number >= first)
        median = kept[len(kept) // 2] if self.is_whole and kept else self.rank_medians[1]
        slow = {number: seconds for number, seconds in cold.items() if number >= first}
        return Course(slow, median, max(cold, default=-1) + 1)

    def outside(self, phases: Phases) -> Observed:
        """Return what was observed outside known phases after the cold start. Where only large values are known one by
        one, all other durations count as outside too."""
        kept, removed = [], Histogram()
        for start, number, seconds, at in self._numbered():
            is_unknown = start > 0 and not self.is_whole
            if is_unknown or (start == 0 and phases.is_outside(number)):
                kept.append((number, seconds, at))
            else:
                removed.add(seconds)
        buckets = {number: count - removed.buckets.get(number, 0) for number, count in self.body.buckets.items()}
        rest: Observed = msgspec.structs.replace(
            self,
            kept=kept,
            n=max(len(kept), self.n - removed.count),
            max_s=max((seconds for _, seconds, _ in kept), default=0.0),
            body=msgspec.structs.replace(self.body, buckets={n: count for n, count in buckets.items() if count > 0}),
            settled_max=max((seconds for _, seconds, at in kept if at <= self.half_at), default=0.0),
        )
        return rest

    def _numbered(self) -> Iterator[tuple[int, int, float, float]]:
        """Yield (start, number since that, seconds, when) of the single values."""
        start, before = 0, -1
        for number, seconds, at in self.kept:
            start += number <= before
            before = number
            yield start, number, seconds, at

    def counts(self, first: int) -> Counter[float]:
        """Return how often each duration occurred, without each start's first occurrences."""
        counts = Counter(seconds for seconds in self.series(first) if seconds > self.above)
        counts.update(self.missing)
        early = sum(number < first for number, _, _ in self.kept)
        left = max(0, self.n - counts.total() - early)
        below = [(value, count) for value, count in _descending(self.body) if value <= self.above]
        of_ranks = sum(count for _, count in below)
        for value, count in below:
            if share := round(count * left / of_ranks):
                counts[value] += share
        return counts

    def first_half_max(self, first: int) -> float:
        """Return the maximum of the first half of the run."""
        if self.is_whole:
            series = self.series(first)
            return max(series[: max(1, len(series) // 2)], default=0.0)
        known = (s for number, s, at in self.kept if first <= number < durations.FIRST_AGAIN and at <= self.half_at)
        return max(self.settled_max, max(known, default=0.0))


class Run(msgspec.Struct):
    """One run. seconds: observed in all. groups: of deadlines whose ranks are not alike, what was observed of each
    group (`core.rank_groups`), by its name."""

    name: str
    configuration: Configuration
    ranks: int
    seconds: float
    deadlines: dict[str, Observed]
    groups: dict[str, dict[str, Observed]] = {}


def warm_up(deadline: str, seen: Sequence[Observed]) -> int:
    """Return how many occurrences after a start are slower than later ones: the same number for all starts."""
    if deadline == INITIAL_HEARTBEAT:
        return calibration.LONGEST_WARM_UP  # there is one a start
    return calibration.warm_up([begun.values[: durations.FIRST] for each in seen for begun in each.starts])


def pool_of(seen: Sequence[Observed], first: int) -> Pool:
    """Put the runs of one deadline together, without each start's first occurrences.

    Every duration counts: those that are known one by one, and from the buckets all others."""
    series = [each.series(first) for each in seen]
    tops = Tops.of(chain.from_iterable(each.placed(first, run) for run, each in enumerate(seen)))
    if all(each.is_whole for each in seen):
        return calibration.pooled(series, tops)
    counts: Counter[float] = Counter()
    medians, drifts, halves = [], [], []
    for each, values in zip(seen, series, strict=True):
        own = Counter(values) if each.is_whole else each.counts(first)
        if not own:
            continue
        descending = sorted(own.items(), reverse=True)
        counts.update(own)
        medians.append(quantile(descending, 0.5))
        n = sum(own.values())
        drifts += [calibration.drift(values) if each.is_whole else each.drift] if n >= calibration.FEWEST else []
        halves.append((n, each.first_half_max(first), descending[0][0]))
    return Pool(
        descending=tuple(sorted(counts.items(), reverse=True)),
        run_medians=tuple(medians),
        drift=sorted(drifts)[len(drifts) // 2] if drifts else 0.0,
        first_half_max=_first_half_max(halves),
        tops=tops,
        run_maxima=tuple(whole for _, _, whole in halves),
    )


def _first_half_max(runs: Sequence[tuple[int, float, float]]) -> float:
    """Return the maximum of the first half of all runs. runs: of each one, how many durations, the maximum of its first
    half, and of all of it."""
    total, seen, largest = sum(n for n, _, _ in runs), 0, 0.0
    for n, first_half, whole in runs:
        if seen + n <= total / 2:
            largest = max(largest, whole)
        elif seen < total / 2:
            largest = max(largest, first_half)
        seen += n
    return largest


def _descending(histogram: Histogram) -> list[tuple[float, int]]:
    return [(upper_bound(number), histogram.buckets[number]) for number in sorted(histogram.buckets, reverse=True)]
