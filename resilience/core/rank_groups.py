"""Which ranks take alike?  The data say: a gap between the medians of ranks, or between what each shows in every run.

The stages of a pipeline take unlike times, and one rank saves checkpoints while others go on. A limit for all of them
follows the slowest. Where ranks fall into a few groups with clear gaps, each group has a limit of its own. Ranks whose
times differ without a gap are one group: their limit follows the slowest, and each is compared with the whole range."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from resilience.core.calibration import RUNS_AGREE

MOST = 8  # groups; more say that there are none
MOST_RANGES = 64  # of ranks that a group's name holds
LONGEST_APART = math.log(2.0)  # between the longest durations of two groups; random stragglers reach a factor of two


class Pace(msgspec.Struct, frozen=True):
    """How long a rank takes, in seconds. median: of all runs. longest: what every run reached, 0 with a single run."""

    median: float
    longest: float = 0.0


def split(paces: Mapping[int, Pace]) -> list[tuple[int, ...]]:
    """Return the groups of ranks, each in ascending order. A single group: all are alike."""
    by_median = _apart(sorted(paces), lambda rank: paces[rank].median, math.log(RUNS_AGREE))
    found = [
        tuple(sorted(group))
        for ranks in by_median
        for group in _apart(ranks, lambda rank: paces[rank].longest, LONGEST_APART)
    ]
    is_clear = len(found) <= MOST and all(len(list(_ranges(group))) <= MOST_RANGES for group in found)
    return sorted(found) if is_clear else [tuple(sorted(paces))]


def _apart(ranks: Sequence[int], value: Callable[[int], float], gap: float) -> list[list[int]]:
    """Split where two neighbours by value are that far apart (log)."""
    groups: list[list[int]] = []
    before = 0.0
    for rank in sorted(ranks, key=value):
        known = value(rank)
        if not groups or (before > 0.0 and math.log(known / before) > gap):
            groups.append([])
        groups[-1].append(rank)
        before = known
    return groups


def named(ranks: Iterable[int]) -> str:
    """Return the name of a group, such as `0,4-7`."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in _ranges(ranks))


def holds(name: str, rank: int) -> bool:
    """Whether the group of that name has this rank. Raises: ValueError for what `named` does not return."""
    for part in name.split(","):
        first, _, last = part.partition("-")
        if int(first) <= rank <= int(last or first):
            return True
    return False


def _ranges(ranks: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Yield (first, last) of ranks that follow one another."""
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda numbered: numbered[1] - numbered[0]):
        members = [rank for _, rank in run]
        yield members[0], members[-1]
