"""Which durations were observed?  Run folders, timings files and plain tables, read into one form.

A run has deadlines (`core.deadlines`); of each, what one occurrence took on the slowest rank, for a false alarm on any
rank restarts the job. A table holds every value. A run folder holds single values, which are lined up over ranks by the
start that they follow, and everything in buckets. What the single values lack is taken from the buckets, so no duration
is lost. Bad input is named with file and line and stops everything: half of the data would be no data."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from resilience.adapters import files
from resilience.analysis.cuts import Verdicts
from resilience.analysis.observed import Begun, Observed, Run
from resilience.analysis.tables import read_table
from resilience.core.calibration import Cut
from resilience.core.deadlines import Start
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
    """The files of one rank. values: with the start that they follow, counted by cycle and iteration."""

    state: durations.Durations
    values: list[tuple[_Place, durations.Value]]
    hows: dict[_Place, Start]
    folder: Path


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
    """Read the files of ranks."""
    ranks: list[_Rank] = []
    used: list[Path] = []
    for path in paths:
        try:
            state = durations.read_histograms(path)
        except (OSError, DecodeError) as error:
            raise ConfigurationError(f"{path}: {error}; it is no timings file, or damaged") from error
        single = path.with_suffix(".jsonl")
        values, hows = _values(single)
        ranks.append(_Rank(state, values, hows, path.parent.parent))
        used += [path, *([single] if single.exists() else [])]
    return ranks, used


def _values(path: Path) -> tuple[list[tuple[_Place, durations.Value]], dict[_Place, Start]]:
    values: list[tuple[_Place, durations.Value]] = []
    hows: dict[_Place, Start] = {}
    place = (0, 0)
    try:
        for _, line in durations.read_values(path):
            match line:
                case durations.Value():
                    values.append((place, line))
                case durations.Started():
                    place = (line.cycle, line.iteration)
                    hows[place] = line.how
    except FileNotFoundError:
        pass
    except (OSError, DecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return values, hows


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
    return [_run(name, list(found.values())) for (name, _), found in by_run.items()]


def _run(name: str, ranks: list[_Rank]) -> Run:
    names = sorted({deadline for rank in ranks for deadline in rank.state.deadlines})
    verdicts = Verdicts([rank.folder for rank in ranks])
    return Run(
        name=name,
        configuration=ranks[0].state.header.configuration,
        ranks=max(len(ranks), *(rank.state.header.world_size for rank in ranks)),
        seconds=max(rank.state.seconds for rank in ranks),
        deadlines={deadline: _merged(deadline, ranks, verdicts) for deadline in names},
    )


def _merged(deadline: str, ranks: list[_Rank], verdicts: Verdicts) -> Observed:
    """Line up the ranks' single values by occurrence, and add up their buckets."""
    found = [(rank, rank.state.deadlines.get(deadline, durations.Series())) for rank in ranks]
    totals = [series.total for _, series in found]
    n = max(total.count for total in totals)
    above = max(durations.threshold(total) if total.count > durations.FIRST else 0.0 for total in totals)
    body = Histogram()
    missing: Counter[int] = Counter()
    slowest: dict[tuple[_Place, int], durations.Value] = {}
    hows: dict[_Place, Start] = {}
    cuts: list[Cut] = []
    left_out = 0
    for rank, series in found:
        body.merge(series.total)
        large = Counter(
            {number: count for number, count in series.total.buckets.items() if upper_bound(number) > above}
        )
        for place, value in rank.values:
            if value.section != deadline:
                continue
            if value.end != "ok":
                cuts.append(verdicts.judged(rank.state.header.rank, place, value))
                continue
            large[bucket(value.s)] -= 1
            if (place, value.j) not in slowest or value.s > slowest[place, value.j].s:
                slowest[place, value.j] = value
            if hows.get(place) != "cold":  # a start is cold for all if it is for one, since they wait for it
                hows[place] = rank.hows.get(place, "cold")
        for number, count in large.items():
            if count > 0:
                missing[number] = max(missing[number], count)
                left_out += count
    ordered = sorted(slowest.items(), key=lambda item: (item[0][0], item[0][1]))
    half_at, settled_max, drift = _course([(rank.state, series) for rank, series in found])
    return Observed(
        starts=_starts(ordered, hows),
        kept=[(value.j, value.s, value.t) for _, value in ordered],
        is_whole=len(ordered) >= n and not missing,
        above=above,
        missing={min(upper_bound(number), body.max): count for number, count in missing.items()},
        body=body,
        n=n,
        max_s=body.max,
        half_at=half_at,
        settled_max=settled_max,
        drift=drift,
        cuts=cuts,
    )


def _starts(ordered: Sequence[tuple[tuple[_Place, int], durations.Value]], hows: Mapping[_Place, Start]) -> list[Begun]:
    """Return the values after each start as far as they follow one another without a gap."""
    starts: dict[_Place, Begun] = {}
    for (place, _), value in ordered:
        if value.j == 0:
            starts[place] = Begun(hows.get(place, "cold"), [])
        if place in starts and len(starts[place].values) == value.j:
            starts[place].values.append(value.s)
    return list(starts.values())


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
