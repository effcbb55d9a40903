"""The observed durations of each deadline of a run, in the form that the fit needs.

Run folders and tables are read into the same form (`calibrate.timings`, `calibrate.tables`), so the same data of one
rank give the same limits from either source. With several ranks, a folder shows the slowest rank only of large and
first occurrences. The durations of all ranks stand for the others, so the median is lower than that of a table, and the
tail is never shorter."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import msgspec

from resilience.calibration import fitting, starts
from resilience.calibration.episodes import RUN, START, LargestDurations
from resilience.calibration.fitting import NEAR_TOP
from resilience.calibration.pool import Pool, drift, pooled
from resilience.calibration.recurring_phases import Course
from resilience.calibration.tails import quantile
from resilience.calibration.unended import Cut, End
from resilience.facts.configuration import Configuration
from resilience.facts.deadlines import INITIAL_HEARTBEAT, Start
from resilience.facts.phases import Phases
from resilience.telemetry import durations
from resilience.telemetry.timings import Histogram, bucket, upper_bound


class StartValues(msgspec.Struct, frozen=True):
    """The single values soon after a start, in seconds by number since it, in order, of the slowest rank. A number is
    missing if its occurrence did not end by itself, or if no file kept it."""

    how: Start
    values: dict[int, float]

    def leading(self) -> list[float]:
        """Return the values up to the first missing number."""
        return [seconds for at, (number, seconds) in enumerate(self.values.items()) if at == number]

    def first(self, first: int) -> list[float]:
        """Return those of the first occurrences. first: how many occurrences these are."""
        return [seconds for number, seconds in self.values.items() if number < first]


class ObservedCut(msgspec.Struct, frozen=True):
    """An occurrence that did not end by itself, its number since the start, and the kind of start."""

    cut: Cut
    number: int
    how: Start


class Unfinished(msgspec.Struct):
    """One occurrence that some ranks did not end by themselves. longest: seconds of the slowest of them, by its end."""

    longest: dict[End, float] = {}

    def add(self, cut: Cut) -> None:
        """Take in what one rank did."""
        self.longest[cut.end] = max(cut.seconds, self.longest.get(cut.end, 0.0))

    def counted(self, ended_s: float | None, median_s: float) -> Iterator[Cut]:
        """Yield what the occurrence counts as. A limit may have ended a healthy one, so it is a hang only otherwise. A
        cut counts beside what other ranks did only if it lasted longer by more than the usual length: these ranks were
        not the reason. It must also have lasted clearly longer than what a limit ended, or a hang: a rank that waited
        for that ended only when its process did.

        ended_s: of the slowest rank that ended it by itself, None without one. median_s: the usual length."""
        judged: tuple[End, ...] = ("killed", "hang")
        others = [Cut(self.longest[end], end) for end in judged if end in self.longest]
        yield from others[:1]
        usual_s = NEAR_TOP * median_s
        most = [max(NEAR_TOP * cut.seconds, cut.seconds + usual_s) for cut in others]
        most += [] if ended_s is None else [ended_s + usual_s]
        cut_s = self.longest.get("cut")
        if cut_s is not None and cut_s > max(most, default=0.0):
            yield Cut(cut_s, "cut")


class ObservedDeadline(msgspec.Struct):
    """One deadline in one run.

    kept: (number since the start, seconds, time) of single occurrences in order, of the slowest rank. is_whole: kept
    contains all occurrences. Otherwise it or `missing` (seconds: count) contains all that took longer than `above`, and
    body contains all occurrences of every rank. n: number of occurrences; max_s: the longest. half_at, settled_max,
    drift: durations over time, see `gathered._course`. rank_medians: the lowest and highest median of a rank, 0 if
    unknown. is_from_beginning: the run did not continue from a checkpoint. is_full: a file of single values was full,
    so large values are missing. first_buckets: the part of body that consists of first occurrences, as count by bucket
    for each number since a start. unnumbered: among the first durations.FIRST_AGAIN occurrences after a start, those
    that are left out of all this, because their numbers are unknown; longest_unnumbered: the longest of these."""

    starts: list[StartValues]
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
    cuts: list[ObservedCut] = []
    rank_medians: tuple[float, float] = (0.0, 0.0)
    is_from_beginning: bool = True
    is_full: bool = False
    first_buckets: dict[int, Counter[int]] = {}
    unnumbered: int = 0
    longest_unnumbered: float = 0.0

    def series(self, first: int) -> list[float]:
        """Return the single values without the first occurrences after each start."""
        return [seconds for number, seconds, _ in self.kept if number >= first]

    def settled_cuts(self, first: int) -> list[Cut]:
        """Return the occurrences that did not end by themselves, without the first ones after each start."""
        return [observed.cut for observed in self.cuts if observed.number >= first]

    def first_cuts(self, first: int, how: Start) -> list[Cut]:
        """Return those among the first occurrences after starts of this kind."""
        return [observed.cut for observed in self.cuts if observed.number < first and observed.how == how]

    def placed(self, first: int, run: int) -> Iterator[tuple[float, int]]:
        """Yield (seconds, place) of the single values without each start's first occurrences. run: its number."""
        for start, number, seconds, _ in self._numbered():
            if number >= first:
                yield seconds, run * RUN + start * START + number

    def course(self, first: int) -> Course | None:
        """Return the single values after the cold start by position; None if the run did not begin with one."""
        if not self.starts or self.starts[0].how != "cold":
            return None
        cold = {number: seconds for start, number, seconds, _ in self._numbered() if start == 0}
        kept = sorted(seconds for number, seconds in cold.items() if number >= first)
        median = kept[len(kept) // 2] if self.is_whole and kept else self.rank_medians[1]
        slow = {number: seconds for number, seconds in cold.items() if number >= first}
        reach = max(cold, default=-1) + 1
        reach = max(reach, self.n) if len(self.starts) == 1 else reach
        return Course(slow, median, reach, self.is_from_beginning)

    def outside(self, phases: Phases) -> ObservedDeadline:
        """Return the observations outside known phases after the cold start. If only large values are known
        individually, all other durations count as outside too."""
        kept, removed = [], Histogram()
        removed_by_number: dict[int, Counter[int]] = defaultdict(Counter)
        for start, number, seconds, at in self._numbered():
            is_unknown = start > 0 and not self.is_whole
            if is_unknown or (start == 0 and phases.is_outside(number)):
                kept.append((number, seconds, at))
            else:
                removed.add(seconds)
                removed_by_number[number][bucket(seconds)] += 1
        buckets = {number: count - removed.buckets.get(number, 0) for number, count in self.body.buckets.items()}
        remaining: ObservedDeadline = msgspec.structs.replace(
            self,
            kept=kept,
            n=max(len(kept), self.n - removed.count),
            max_s=max((seconds for _, seconds, _ in kept), default=0.0),
            body=msgspec.structs.replace(self.body, buckets={n: count for n, count in buckets.items() if count > 0}),
            settled_max=max((seconds for _, seconds, at in kept if at <= self.half_at), default=0.0),
            first_buckets={
                number: buckets_of_first - removed_by_number[number]
                for number, buckets_of_first in self.first_buckets.items()
            },
            cuts=[cut for cut in self.cuts if cut.how == "cold" and phases.is_outside(cut.number)],
        )
        return remaining

    def _numbered(self) -> Iterator[tuple[int, int, float, float]]:
        """Yield (start, number since that start, seconds, time) of the single values."""
        start, previous_number = 0, -1
        for number, seconds, at in self.kept:
            start += number <= previous_number
            previous_number = number
            yield start, number, seconds, at

    def counts(self, first: int) -> Counter[float]:
        """Return the count of each duration, without the first occurrences after each start."""
        counts = Counter(seconds for seconds in self.series(first) if seconds > self.above)
        counts.update(self.missing)
        early = sum(number < first for number, _, _ in self.kept)
        remaining = max(0, self.n - counts.total() - early)
        of_first = sum((buckets for number, buckets in self.first_buckets.items() if number < first), Counter[int]())
        small = [(value, count) for value, count in _descending(self.body, of_first) if value <= self.above]
        small_total = sum(count for _, count in small)
        before, given = 0, 0
        for value, count in small:  # whole occurrences, which add up: each bucket gets what is missing up to its end
            before += count
            if share := round(before * remaining / small_total) - given:
                counts[value] += share
                given += share
        return counts

    def first_half_max(self, first: int) -> float:
        """Return the maximum of the first half of the run."""
        if self.is_whole:
            series = self.series(first)
            return max(series[: max(1, len(series) // 2)], default=0.0)
        early_values = (
            s for number, s, at in self.kept if first <= number < durations.FIRST_AGAIN and at <= self.half_at
        )
        return max(self.settled_max, max(early_values, default=0.0))


class ObservedRun(msgspec.Struct):
    """One run. ranks: with timings. seconds: total observed time. groups: for deadlines whose ranks differ, the
    observations of each group (`calibration.rank_groups`), by its name. world_size: ranks of the job, 0 if unknown.
    began_at: wall seconds, 0 if unknown. excluded: deadlines that were recorded and are not asked for."""

    name: str
    configuration: Configuration
    ranks: int
    seconds: float
    deadlines: dict[str, ObservedDeadline]
    groups: dict[str, dict[str, ObservedDeadline]] = {}
    world_size: int = 0
    began_at: float = 0.0
    excluded: frozenset[str] = frozenset()

    @property
    def world(self) -> int:
        """Return the number of ranks of the job, also those without timings."""
        return max(self.ranks, self.world_size)


def warm_up(deadline: str, observed: Sequence[ObservedDeadline]) -> int:
    """Return how many occurrences after a start are slower than later ones: one number for all starts."""
    if deadline == INITIAL_HEARTBEAT:
        return starts.LONGEST_WARM_UP  # there is one per start
    return starts.warm_up([begun.leading() for run in observed for begun in run.starts])


def pool_of(observed: Sequence[ObservedDeadline], first: int) -> Pool:
    """Combine the runs of one deadline, without the first occurrences after each start.

    Every duration counts: those known individually, and all others from the buckets."""
    series = [deadline.series(first) for deadline in observed]
    tops = LargestDurations.of(
        chain.from_iterable(deadline.placed(first, run) for run, deadline in enumerate(observed))
    )
    if all(deadline.is_whole for deadline in observed):
        return pooled(series, tops)
    if not tops.places:  # the files of single values are lost: nobody knows whether the slow ones were one episode
        tops = LargestDurations(most_per_event=max(1, sum(deadline.n for deadline in observed)))
    counts: Counter[float] = Counter()
    medians, drifts, halves = [], [], []
    for deadline, values in zip(observed, series, strict=True):
        counts_of_run = Counter(values) if deadline.is_whole else deadline.counts(first)
        if not counts_of_run:
            continue
        descending = sorted(counts_of_run.items(), reverse=True)
        counts.update(counts_of_run)
        medians.append(quantile(descending, 0.5))
        n = sum(counts_of_run.values())
        drifts += [drift(values) if deadline.is_whole else deadline.drift] if n >= fitting.FEWEST else []
        halves.append((n, deadline.first_half_max(first), descending[0][0]))
    return Pool(
        descending=tuple(sorted(counts.items(), reverse=True)),
        run_medians=tuple(medians),
        drift=sorted(drifts)[len(drifts) // 2] if drifts else 0.0,
        first_half_max=_first_half_max(halves),
        tops=tops,
        run_maxima=tuple(whole for _, _, whole in halves),
    )


def _first_half_max(runs: Sequence[tuple[int, float, float]]) -> float:
    """Return the maximum of the first half of all runs. runs: for each, the number of durations, the maximum of its
    first half, and its maximum."""
    total, before, largest = sum(n for n, _, _ in runs), 0, 0.0
    for n, first_half, whole in runs:
        if before + n <= total / 2:
            largest = max(largest, whole)
        elif before < total / 2:
            largest = max(largest, first_half)
        before += n
    return largest


def _descending(histogram: Histogram, without: Mapping[int, int]) -> list[tuple[float, int]]:
    """Return (seconds, count) of each bucket, largest first. without: count by bucket that is left out."""
    remaining = ((number, count - without.get(number, 0)) for number, count in histogram.buckets.items())
    return [(upper_bound(number), count) for number, count in sorted(remaining, reverse=True) if count > 0]
