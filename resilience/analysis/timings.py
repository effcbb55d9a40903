"""Which durations were observed?  Run folders, timings files and plain tables, read into one form.

A run has deadlines (`core.deadlines`); of each, what one occurrence took on the slowest rank, for a false alarm on any
rank restarts the job. A table holds every value. A run folder holds single values, which are lined up over ranks by the
start that they follow, and everything in buckets. What the single values lack is taken from the buckets, so no duration
is lost. Bad input is named with file and line and stops everything: half of the data would be no data."""

from __future__ import annotations

import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

import msgspec

from resilience.adapters import files
from resilience.analysis.cuts import Verdicts
from resilience.analysis.observed import Begun, Observed, Run
from resilience.analysis.tables import read_table
from resilience.core import rank_groups
from resilience.core.calibration import FEWEST, Cut
from resilience.core.deadlines import Start
from resilience.core.rank_groups import Pace
from resilience.core.timeouts import Source
from resilience.errors import ConfigurationError, DecodeError
from resilience.telemetry import durations
from resilience.telemetry.timings import Histogram, bucket, upper_bound

FRESH = 30.0  # seconds since a file was written last; a monitor that lives writes every 15
LAST_RECORDS = 8  # of a file, among which its end is looked for

_Place = tuple[int, int]  # cycle and iteration of a start


class Input(msgspec.Struct):
    """Everything that was read. notes: what a person should know of it. unmatched: sections that were asked for and
    that no run has."""

    runs: list[Run]
    sources: list[Source]
    notes: list[str] = []
    unmatched: list[str] = []


Progress = Callable[[str, int, int], None]  # path, done, of how many


def read(paths: Sequence[Path], sections: frozenset[str] = frozenset(), progress: Progress | None = None) -> Input:
    """Read run folders (timings of every rank), folders of timings files, and tables (.csv, .csv.gz).

    sections: only these, all if empty. Raises: ConfigurationError, naming file and line."""
    ranks: list[_Rank] = []
    tables: list[Run] = []
    sources: list[Path] = []
    notes: list[str] = []
    for number, path in enumerate(paths):
        if progress is not None:
            progress(str(path), number, len(paths))
        if path.resolve() in {before.resolve() for before in paths[:number]}:
            notes.append(f"{path} is named twice; it counts once")
        elif path.is_dir():
            found, runs, used = _folder(path / "timings" if (path / "timings").is_dir() else path)
            ranks += found
            tables += runs
            sources += used
        elif path.name.endswith((".csv", ".csv.gz")):
            tables += read_table(path)
            sources.append(path)
        elif path.suffix == ".hist":
            found, used = _ranks([path])
            ranks += found
            sources += used
        else:
            raise ConfigurationError(
                f"{path} is neither a run folder nor a table (.csv, .csv.gz) nor a timings file (.hist); the run "
                "folder is the one that holds job.json"
                if path.exists()
                else f"{path} does not exist; a run folder, a table or a timings file was expected"
            )
    if progress is not None:
        progress("", len(paths), len(paths))
    runs = [*_runs(ranks, notes), *tables]
    unmatched = sorted(sections - {name for run in runs for name in run.deadlines})
    for run in runs:
        if sections:
            run.deadlines = {name: seen for name, seen in run.deadlines.items() if name in sections}
    read_from = [Source(str(file), _sha256(file)) for file in sources]
    return Input(runs, read_from, [*notes, *_unfinished(sources)], unmatched)


def _unfinished(sources: Sequence[Path]) -> list[str]:
    """Name the runs that are still being written: what they will bring yet is missing."""
    fresh = {
        file.parent.parent for file in sources if file.suffix == ".hist" and time.time() - file.stat().st_mtime < FRESH
    }
    growing = sorted(folder for folder in fresh if not _is_over(folder))
    return [f"{folder} is still being written; it is taken as it is now" for folder in growing]


def _is_over(folder: Path) -> bool:
    """Whether the records of all ranks and agents say that they have ended."""
    last = [files.tail(path, LAST_RECORDS) for path in (folder / "records").glob("*.jsonl")]
    return bool(last) and all(map(_has_ended, last))


def _has_ended(records: Sequence[str]) -> bool:
    """Whether these last records hold the end. A few follow it; a new start takes it back."""
    for record in reversed(records):
        if '"monitor.ended"' in record or '"job.ended"' in record:
            return True
        if '"monitor.started"' in record:
            return False
    return False


# -- run folders -----------------------------------------------------------------------------------


class _Rank(msgspec.Struct):
    """The histograms of one rank, and where its single values are."""

    state: durations.Durations
    path: Path

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.path.parent.parent


def _folder(folder: Path) -> tuple[list[_Rank], list[Run], list[Path]]:
    found = sorted(folder.glob("*.hist"))
    if found:
        made, used = _ranks(found)
        return made, [], used
    tables = sorted((*folder.glob("*.csv"), *folder.glob("*.csv.gz")))
    if tables:
        return [], [run for table in tables for run in read_table(table)], tables
    raise ConfigurationError(
        f"{folder} holds no timings; a run records them where sections, heartbeats or steps are used. Is it the run's "
        "folder, and has the run shown such signs?"
    )


def _ranks(paths: Sequence[Path]) -> tuple[list[_Rank], list[Path]]:
    """Read the histograms of ranks."""
    ranks: list[_Rank] = []
    used: list[Path] = []
    for path in paths:
        try:
            state = durations.read_histograms(path)
        except (OSError, DecodeError) as error:
            raise ConfigurationError(f"{path}: {error}; it is no timings file, or damaged") from error
        single = path.with_suffix(".jsonl")
        ranks.append(_Rank(state, single))
        used += [path, *([single] if single.exists() else [])]
    return ranks, used


def _runs(ranks: Sequence[_Rank], notes: list[str]) -> list[Run]:
    """Put the ranks of each run together. A run is known by its name and its launch, so folders that several nodes have
    kept of it are one run, and a folder that is named twice, or is a copy, counts once."""
    by_run: dict[tuple[str, str], dict[tuple[str, int, float], _Rank]] = defaultdict(dict)
    for rank in ranks:
        header = rank.state.header
        known = by_run[header.run, header.launch]
        mark = (header.node, header.rank, rank.state.began_at)
        if mark not in known:
            known[mark] = rank
        elif known[mark].folder != rank.folder:
            notes.append(f"{rank.folder} holds run {header.run} again; it counts once")
    groups = _groups([list(found.values()) for found in by_run.values()])
    return [_run(name, list(found.values()), groups) for (name, _), found in by_run.items()]


_Groups = dict[str, list[tuple[int, ...]]]  # by deadline, where there is more than one


def _groups(runs: Sequence[Sequence[_Rank]]) -> _Groups:
    """Find the groups of like ranks of each deadline, over all runs. A rank that only some runs have is in none."""
    medians: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    longest: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for ranks in runs:
        for rank in ranks:
            for deadline, series in rank.state.deadlines.items():
                if series.total.count >= FEWEST:
                    number = rank.state.header.rank
                    medians[deadline][number].append(durations.median(series.total))
                    settled = (period.settled_max for period in series.periods.values())
                    longest[deadline][number].append(max(settled, default=0.0))
    found: _Groups = {}
    for deadline, by_rank in medians.items():
        paces = {
            rank: Pace(geometric_mean(each), min(longest[deadline][rank]) if len(runs) > 1 else 0.0)
            for rank, each in by_rank.items()
            if len(each) == len(runs) and min(each) > 0.0
        }
        groups = rank_groups.split(paces)
        if len(groups) > 1:
            found[deadline] = groups
    return found


def _run(name: str, ranks: list[_Rank], groups: _Groups) -> Run:
    names = sorted({deadline for rank in ranks for deadline in rank.state.deadlines})
    gathered = {deadline: _Gathered.of(deadline, ranks) for deadline in names}
    of_groups = {
        deadline: {members: _Gathered.of(deadline, _among(ranks, members)) for members in groups.get(deadline, ())}
        for deadline in names
    }
    verdicts = Verdicts([rank.folder for rank in ranks])
    for rank in ranks:
        number = rank.state.header.rank
        own = {
            deadline: [found, *(group for members, group in of_groups[deadline].items() if number in members)]
            for deadline, found in gathered.items()
        }
        _gather(rank, own, verdicts)
    return Run(
        name=name,
        configuration=ranks[0].state.header.configuration,
        ranks=max(len(ranks), *(rank.state.header.world_size for rank in ranks)),
        seconds=max(rank.state.seconds for rank in ranks),
        deadlines={deadline: found.observed() for deadline, found in gathered.items()},
        groups={
            deadline: {rank_groups.named(members): group.observed() for members, group in found.items()}
            for deadline, found in of_groups.items()
            if found
        },
    )


def _among(ranks: Sequence[_Rank], members: tuple[int, ...]) -> list[_Rank]:
    return [rank for rank in ranks if rank.state.header.rank in members]


class _Gathered(msgspec.Struct):
    """One deadline of a run while its ranks are read, one after the other. slowest: (seconds, when) by start and number
    since that. above: all that took longer is among the single values, or missing there."""

    deadline: str
    body: Histogram
    n: int
    above: float
    course: tuple[float, float, float]
    rank_medians: tuple[float, float]
    slowest: dict[_Place, dict[int, tuple[float, float]]] = {}
    hows: dict[_Place, Start] = {}
    missing: dict[int, int] = {}
    cuts: list[Cut] = []

    @classmethod
    def of(cls, deadline: str, ranks: Sequence[_Rank]) -> _Gathered:
        """Add up the histograms of all ranks."""
        found = [(rank.state, rank.state.deadlines.get(deadline, durations.Series())) for rank in ranks]
        body = Histogram()
        for _, series in found:
            body.merge(series.total)
        medians = [durations.median(series.total) for _, series in found if series.total.count]
        return cls(
            deadline,
            body,
            n=max((series.total.count for _, series in found), default=0),
            above=max(
                (
                    durations.threshold(series.total) if series.total.count > durations.FIRST else 0.0
                    for _, series in found
                ),
                default=0.0,
            ),
            course=_course(found),
            rank_medians=(min(medians, default=0.0), max(medians, default=0.0)),
        )

    def take(self, place: _Place, how: Start, value: durations.Value) -> None:
        """Keep a single value if it is the slowest rank's."""
        values = self.slowest.get(place)
        if values is None:
            values = self.slowest[place] = {}
        known = values.get(value.j)
        if known is None or value.s > known[0]:
            values[value.j] = (value.s, value.t)
        if how == "cold" or place not in self.hows:  # a start is cold for all if it is for one: they wait for it
            self.hows[place] = how

    def observed(self) -> Observed:
        """Return it in the form that the fit needs."""
        places = sorted(self.slowest)
        kept = [(number, *self.slowest[place][number]) for place in places for number in sorted(self.slowest[place])]
        half_at, settled_max, drift = self.course
        return Observed(
            starts=[Begun(self.hows.get(place, "cold"), _leading(self.slowest[place])) for place in places],
            kept=kept,
            is_whole=len(kept) >= self.n and not self.missing,
            above=self.above,
            missing={min(upper_bound(number), self.body.max): count for number, count in self.missing.items()},
            body=self.body,
            n=self.n,
            max_s=self.body.max,
            half_at=half_at,
            settled_max=settled_max,
            drift=drift,
            cuts=self.cuts,
            rank_medians=self.rank_medians,
        )


def _gather(rank: _Rank, gathered: Mapping[str, Sequence[_Gathered]], verdicts: Verdicts) -> None:
    """Line up a rank's single values with those of the others, and find out which large ones it lacks. gathered: all
    that this rank is part of."""
    large = {
        deadline: [
            {number: count for number, count in series.total.buckets.items() if upper_bound(number) > found.above}
            for found in gathered[deadline]
        ]
        for deadline, series in rank.state.deadlines.items()
    }
    place: _Place = (0, 0)
    how: Start = "cold"
    try:
        lines = durations.read_lines(rank.path)
    except FileNotFoundError:
        lines = []
    except (OSError, DecodeError) as error:
        raise ConfigurationError(f"{rank.path}: {error}") from error
    for line in lines:
        if isinstance(line, durations.Started):
            place, how = (line.cycle, line.iteration), line.how
        elif isinstance(line, durations.Value) and line.section in gathered:
            if line.end != "ok":
                cut = verdicts.judged(rank.state.header.rank, place, line)
                for found in gathered[line.section]:
                    found.cuts.append(cut)
                continue
            number = bucket(line.s)
            for counts in large.get(line.section, ()):
                if number in counts:  # a damaged file may have lines of which its table knows nothing
                    counts[number] -= 1
            for found in gathered[line.section]:
                found.take(place, how, line)
    for deadline, lacking in large.items():
        for found, counts in zip(gathered[deadline], lacking, strict=True):
            for number, count in counts.items():
                if count > 0:
                    found.missing[number] = max(found.missing.get(number, 0), count)


def _leading(values: Mapping[int, tuple[float, float]]) -> list[float]:
    """Return the values after a start as far as they follow one another without a gap."""
    leading: list[float] = []
    while (found := values.get(len(leading))) is not None:
        leading.append(found[0])
    return leading


def _course(found: Sequence[tuple[durations.Durations, durations.Series]]) -> tuple[float, float, float]:
    """Return how durations went over time, without the first ones after each start: when half of the occurrences were
    over (wall seconds), the maximum until then, and the drift from the first third to the last one."""
    half_at, largest = 0.0, 0.0
    drifts = []
    for state, series in found:
        total = sum(period.settled for period in series.periods.values())
        seen = 0
        thirds: tuple[list[tuple[float, int]], ...] = ([], [], [])
        for number, period in sorted(series.periods.items()):
            if not period.settled:
                continue
            if seen < total / 2:
                largest = max(largest, period.settled_max)
                half_at = max(half_at, state.began_at + (number + 1) * state.period_s)
            thirds[min(2, int(3 * (seen + period.settled / 2) / total))].append((period.median, period.settled))
            seen += period.settled
        counts = [sum(count for _, count in third) for third in thirds]
        if min(counts[0], counts[2]) >= 10:
            first, last = (
                sum(count * math.log(median) for median, count in third) / sum(count for _, count in third)
                for third in (thirds[0], thirds[2])
            )
            drifts.append(last - first)
    return half_at, largest, sorted(drifts)[len(drifts) // 2] if drifts else 0.0


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


__all__ = ["Input", "Observed", "Run", "read"]
