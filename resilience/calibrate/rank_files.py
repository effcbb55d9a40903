"""The timings files of one rank of a run: a rank that moved has one on each node that it ran on."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from resilience.calibration.recurring_phases import BEGINNING
from resilience.telemetry import durations
from resilience.telemetry.timings import Histogram


class RankFile(msgspec.Struct):
    """The histograms of one rank on one node, and where its single values are."""

    state: durations.Durations
    path: Path

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.path.parent.parent


class Rank(msgspec.Struct):
    """One initial rank of a run, which has a file on each node that it ran on, in the order of their beginnings."""

    number: int
    files: list[RankFile]

    @property
    def deadlines(self) -> list[str]:
        return sorted({deadline for file in self.files for deadline in file.state.deadlines})

    @property
    def seconds(self) -> float:
        """Return the observed time. A file of a node to which the rank returned covers the time between as well."""
        total, until = 0.0, -math.inf
        for state in (file.state for file in self.files):
            end = state.began_at + state.seconds
            total += max(0.0, end - max(state.began_at, until))
            until = max(until, end)
        return total

    @property
    def is_from_beginning(self) -> bool:
        """Return True if this rank's steps show that its run did not continue from a checkpoint."""
        first_step = self.files[0].state.first_step
        return first_step is not None and first_step <= BEGINNING

    def series(self, deadline: str) -> list[durations.Series]:
        """Return the histograms of all its files."""
        return [file.state.deadlines[deadline] for file in self.files if deadline in file.state.deadlines]

    def total(self, deadline: str) -> Histogram:
        """Return all its durations; not to be changed."""
        of_files = [series.total for series in self.series(deadline)]
        if len(of_files) == 1:
            return of_files[0]
        total = Histogram()
        for histogram in of_files:
            total.merge(histogram)
        return total

    def early(self, deadline: str) -> Counter[int]:
        """Return the count by bucket of the durations among its first ones after each start."""
        return sum((Counter(series.early.buckets) for series in self.series(deadline)), Counter[int]())

    def periods(self, deadline: str) -> list[tuple[float, durations.Period]]:
        """Return its periods with settled durations and their ends (wall seconds), in order."""
        periods = [
            (file.state.began_at + (number + 1) * file.state.period_s, period)
            for file in self.files
            if deadline in file.state.deadlines
            for number, period in file.state.deadlines[deadline].periods.items()
            if period.settled
        ]
        return sorted(periods, key=lambda entry: entry[0])


def by_rank(files: Sequence[RankFile]) -> list[Rank]:
    """Return the ranks of one run."""
    by_number: dict[int, list[RankFile]] = defaultdict(list)
    for file in sorted(files, key=lambda file: file.state.began_at):
        by_number[file.state.header.rank].append(file)
    return [Rank(number, files_of_rank) for number, files_of_rank in by_number.items()]
