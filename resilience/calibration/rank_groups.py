"""Which ranks have similar durations?  Groups of ranks, separated by gaps in the data.

The stages of a pipeline have different durations, and one rank saves checkpoints while the others continue. One limit
for all ranks follows the slowest. If ranks fall into a few groups with clear gaps, each group gets its own limit. A gap
lies between the medians of ranks in each run, or between the durations that each rank reaches in every run. Ranks
without a gap are one group: the limit follows the slowest, and each rank is compared with the whole range."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from resilience.calibration.fitting import RUNS_AGREE

MOST = 8  # groups; if there are more, all ranks count as one group
MOST_RANGES = 64  # ranges of ranks in a group's name
LONGEST_APART = math.log(
    2.0
)  # gap between the longest durations of two groups; random stragglers reach a factor of two
_Values = tuple[float, ...]
_NAME = re.compile(r"[0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9}(-[0-9]{1,9})?)*")


class RankPace(msgspec.Struct, frozen=True):
    """A rank's durations in seconds. medians: one for each run, above 0. longest: a duration that every run reached, 0
    for one run."""

    medians: tuple[float, ...]
    longest: float = 0.0


def split(paces: Mapping[int, RankPace]) -> list[tuple[int, ...]]:
    """Return the groups of ranks, each in ascending order. A single group means that all ranks are similar."""
    by_median = _apart(sorted(paces), lambda rank: paces[rank].medians, math.log(RUNS_AGREE))
    groups = [
        tuple(sorted(group))
        for ranks in by_median
        for group in _apart(ranks, lambda rank: (paces[rank].longest,), LONGEST_APART)
    ]
    is_clear = len(groups) <= MOST and all(len(list(_ranges(group))) <= MOST_RANGES for group in groups)
    return sorted(groups) if is_clear else [tuple(sorted(paces))]


def _apart(ranks: Sequence[int], values: Callable[[int], _Values], gap: float) -> list[list[int]]:
    """Split the ranks, sorted by their values, wherever all before are more than `gap` (log) below all that follow, in
    each of the values."""
    ordered = sorted(ranks, key=lambda rank: math.prod(values(rank)))
    highest = itertools.accumulate(map(values, ordered), _elementwise(max))
    lowest = reversed(list(itertools.accumulate(map(values, reversed(ordered)), _elementwise(min))))
    groups = [ordered[:1]]
    for rank, below, above in zip(ordered[1:], highest, itertools.islice(lowest, 1, None), strict=False):
        if all(low > 0.0 and math.log(high / low) > gap for low, high in zip(below, above, strict=True)):
            groups.append([])
        groups[-1].append(rank)
    return groups


def _elementwise(
    choose: Callable[[float, float], float],
) -> Callable[[tuple[float, ...], tuple[float, ...]], tuple[float, ...]]:
    """Return a function that chooses in each place of two tuples."""
    return lambda one, other: tuple(map(choose, one, other))


def named(ranks: Iterable[int]) -> str:
    """Return the name of a group, such as `0,4-7`."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in _ranges(ranks))


def is_name(text: str) -> bool:
    """Return True for the name of a group."""
    return _NAME.fullmatch(text) is not None


def holds(name: str, rank: int) -> bool:
    """Return True if the group of this name contains the rank. Raises: ValueError for what is no name."""
    return any(first <= rank <= last for first, last in _parts(name))


def overlap(name: str, other: str) -> bool:
    """Return True if a rank is in both groups of these names. Raises: ValueError for what is no name."""
    return any(
        first <= other_last and other_first <= last
        for first, last in _parts(name)
        for other_first, other_last in _parts(other)
    )


def _parts(name: str) -> Iterable[tuple[int, int]]:
    """Yield (first, last) of each range of ranks in a name. Raises: ValueError for what is no name."""
    for part in name.split(","):
        first, _, last = part.partition("-")
        yield int(first), int(last or first)


def _ranges(ranks: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Yield (first, last) of each range of consecutive ranks."""
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda numbered: numbered[1] - numbered[0]):
        members = [rank for _, rank in run]
        yield members[0], members[-1]
