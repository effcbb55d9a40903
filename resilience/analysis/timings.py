"""Which durations were observed?  Run folders, timings files and plain tables, read into one form.

A run has deadlines (sections, heartbeats, the time out of sections); of each, what one occurrence took on
the slowest rank, for a false alarm on any rank restarts the job. A table holds every value. A timings
file holds the first and the large ones, which are lined up over ranks by their number, and everything in
buckets. Bad input is named with file and line and stops everything: half of the data would be no data."""

from __future__ import annotations

import csv
import gzip
import hashlib
import math
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from resilience.adapters import files
from resilience.core.calibration import Cut, End, Pool, pooled, quantile
from resilience.core.timeouts import HEARTBEAT, TABLE, Source
from resilience.errors import ConfigurationError, DecodeError
from resilience.telemetry import durations
from resilience.telemetry.timings import Histogram, upper_bound

FRESH = 30.0  # seconds since a file was written last; a monitor that lives writes every 15
COLUMNS = ("run", "section", "rank", "i", "seconds")
ENDS = ("ok", "cut", "killed", "hang")


class Observed(msgspec.Struct):
    """One deadline in one run. starts: the leading values after each start, in order, the slowest rank's;
    is_whole: they are all there are. Else tail holds the large ones (seconds above `above`), body all of
    them in buckets, of every rank; n: occurrences in all."""

    starts: list[list[float]] = []
    is_whole: bool = True
    tail: list[float] = []
    above: float = 0.0
    body: Histogram = msgspec.field(default_factory=Histogram)
    n: int = 0
    first_half_max: float = 0.0
    drift: float = 0.0
    cuts: list[Cut] = []
    hangs: list[tuple[int, int, float]] = []  # rank, occurrence, seconds


class Run(msgspec.Struct):
    """One run. seconds: observed in all."""

    name: str
    fingerprint: str
    ranks: int
    seconds: float
    deadlines: dict[str, Observed]


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
    runs: list[Run] = []
    sources: list[Path] = []
    for number, path in enumerate(paths):
        if progress is not None:
            progress(str(path), number, len(paths))
        if path.is_dir():
            folder = path / "timings" if (path / "timings").is_dir() else path
            made, used = _folder(folder)
            runs += made
            sources += used
        elif path.name.endswith((".csv", ".csv.gz")):
            runs += _table(path)
            sources.append(path)
        elif path.suffix == ".hist":
            made, used = _ranks([path])
            runs += made
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
    unmatched = sorted(sections - {name for run in runs for name in run.deadlines})
    for run in runs:
        if sections:
            run.deadlines = {name: seen for name, seen in run.deadlines.items() if name in sections}
    return Input(runs, [Source(str(file), _sha256(file)) for file in sources], _unfinished(sources), unmatched)


def _unfinished(sources: Sequence[Path]) -> list[str]:
    """Name the runs that are still being written: what they will bring yet is missing."""
    fresh = {
        file.parent.parent for file in sources if file.suffix == ".hist" and time.time() - file.stat().st_mtime < FRESH
    }
    growing = sorted(folder for folder in fresh if not _is_over(folder))
    return [f"{folder} is still being written; it is taken as it is now" for folder in growing]


def _is_over(folder: Path) -> bool:
    """Whether everybody who writes records there has said that it was the last one."""
    ends = ('"monitor.ended"', '"job.ended"')
    last = [files.tail(path, 1) for path in (folder / "records").glob("*.jsonl")]
    return bool(last) and all(lines and any(end in lines[0] for end in ends) for lines in last)


# -- tables ----------------------------------------------------------------------------------------


def _table(path: Path) -> list[Run]:
    """Read `run,section,rank,i,seconds[,end]`."""
    values: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    cuts: dict[tuple[str, str], list[tuple[int, int, Cut]]] = defaultdict(list)
    ranks: dict[str, set[str]] = defaultdict(set)
    for line, row in _rows(path):
        run, section, rank = row["run"], row["section"], row["rank"]
        number, seconds = _whole(path, line, row["i"]), _seconds(path, line, row["seconds"])
        ranks[run].add(rank)
        if row["end"] == "ok":
            seen = values[run, section]
            seen[number] = max(seconds, seen.get(number, 0.0))
        else:
            where = int(rank) if rank.isdecimal() else 0
            cuts[run, section].append((where, number, Cut(seconds, row["end"])))  # type: ignore[arg-type]
    if not values:
        raise ConfigurationError(f"{path} holds no durations; expected a line for each under {','.join(COLUMNS)}")
    runs = []
    for run in sorted({run for run, _ in values}, key=lambda name: (len(name), name)):
        deadlines = {
            section: _whole_series([seen[i] for i in sorted(seen)], cuts[name, section])
            for (name, section), seen in values.items()
            if name == run
        }
        seconds = max(sum(seen.starts[0]) for seen in deadlines.values())
        runs.append(Run(f"{path.name}:{run}", TABLE + path.name, len(ranks[run]), seconds, deadlines))
    return runs


def _whole_series(series: list[float], cuts: Iterable[tuple[int, int, Cut]]) -> Observed:
    cuts = list(cuts)
    return Observed(
        starts=[series],
        n=len(series),
        cuts=[cut for _, _, cut in cuts],
        hangs=[(rank, i, cut.seconds) for rank, i, cut in cuts if cut.end == "hang"],
    )


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    zipped = path.name.endswith(".gz")
    line = 0
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8", newline="")
            if zipped
            else path.open(encoding="utf-8", newline="") as file
        ):
            table = csv.reader(file)
            names = next(table, [])
            if tuple(names[:5]) != COLUMNS or names[5:] not in ([], ["end"]):
                raise ConfigurationError(
                    f"{path}:1: the columns are {','.join(names) or 'missing'}, expected {','.join(COLUMNS)}[,end]"
                )
            for row in table:
                line = table.line_num
                if len(row) != len(names):
                    raise ConfigurationError(f"{path}:{line}: {len(row)} fields, expected {len(names)}: {row}")
                end = row[5] if len(row) > 5 else "ok"
                if end not in ENDS:
                    raise ConfigurationError(f"{path}:{line}: end is {end!r}, expected one of {', '.join(ENDS)}")
                yield (
                    line,
                    {"run": row[0], "section": row[1], "rank": row[2], "i": row[3], "seconds": row[4], "end": end},
                )
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(
            f"{path}: damaged after line {line + 1} ({error}); copy it again, or leave it out"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from error


def _whole(path: Path, line: int, text: str) -> int:
    if not text.isdecimal():
        raise ConfigurationError(f"{path}:{line}: i is {text!r}, expected a whole number from 0")
    return int(text)


def _seconds(path: Path, line: int, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds < math.inf:
        raise ConfigurationError(f"{path}:{line}: seconds is {text!r}, expected a number from 0, finite")
    return max(seconds, 1e-9)  # a clock of whole milliseconds shows 0


# -- timings files ---------------------------------------------------------------------------------


def _folder(folder: Path) -> tuple[list[Run], list[Path]]:
    found = sorted(folder.glob("*.hist"))
    if found:
        return _ranks(found)
    tables = sorted((*folder.glob("*.csv"), *folder.glob("*.csv.gz")))
    if tables:
        return [run for table in tables for run in _table(table)], tables
    raise ConfigurationError(
        f"{folder} holds no timings; a run records them where sections, heartbeats or steps are used. Is it the run's "
        "folder, and has the run shown such signs?"
    )


def _ranks(paths: Sequence[Path]) -> tuple[list[Run], list[Path]]:
    """Read the files of all ranks, and put those of one run together."""
    by_run: dict[tuple[str, str], list[tuple[durations.Durations, list[durations.Value], int]]] = defaultdict(list)
    used: list[Path] = []
    for path in paths:
        try:
            state = durations.read_histograms(path)
        except (OSError, DecodeError) as error:
            raise ConfigurationError(f"{path}: {error}; it is no timings file, or damaged") from error
        single = path.with_suffix(".jsonl")
        values, starts = _values(single)
        by_run[state.header.run, state.header.fingerprint].append((state, values, starts))
        used += [path, *([single] if single.exists() else [])]
    return [_run(name, mark, ranks) for (name, mark), ranks in by_run.items()], used


def _values(path: Path) -> tuple[list[durations.Value], int]:
    values, starts = [], 0
    try:
        for _, line in durations.read_values(path):
            match line:
                case durations.Value():
                    values.append(line)
                case durations.Started():
                    starts += 1
    except FileNotFoundError:
        pass
    except (OSError, DecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return values, max(1, starts)


def _run(name: str, mark: str, ranks: list[tuple[durations.Durations, list[durations.Value], int]]) -> Run:
    names = sorted({section for state, _, _ in ranks for section in state.sections})
    return Run(
        name=name,
        fingerprint=mark,
        ranks=max(len(ranks), *(state.header.world_size for state, _, _ in ranks)),
        seconds=max(state.seconds for state, _, _ in ranks),
        deadlines={section or HEARTBEAT: _merged(section, ranks) for section in names},
    )


def _merged(section: str, ranks: list[tuple[durations.Durations, list[durations.Value], int]]) -> Observed:
    """Line up the ranks' single values by occurrence, and add up their buckets."""
    body, n, above = Histogram(), 0, 0.0
    halves: list[tuple[float, float]] = []
    slowest: dict[int, durations.Value] = {}
    cuts: list[tuple[int, int, Cut]] = []
    for state, values, _ in ranks:
        periods = state.sections.get(section, {})
        total = Histogram()
        for number in sorted(periods):
            total.merge(periods[number].histogram)
        body.merge(total)
        n = max(n, total.count)
        above = max(above, durations.threshold(total) if total.count > durations.FIRST else 0.0)
        halves.append(_half(periods, total))
        for value in values:
            if value.section != section:
                continue
            if value.end != "ok":
                cuts.append((state.header.rank, value.i, Cut(value.s, value.end)))
            elif value.i not in slowest or value.s > slowest[value.i].s:
                slowest[value.i] = value
    ordered = [slowest[i] for i in sorted(slowest)]
    return Observed(
        starts=_starts(ordered),
        is_whole=len(ordered) >= n,
        tail=[value.s for value in ordered if value.s > above and value.j >= durations.FIRST_AGAIN],
        above=above,
        body=body,
        n=n,
        first_half_max=max(first for first, _ in halves),
        drift=sorted(drift for _, drift in halves)[len(halves) // 2],
        cuts=[cut for _, _, cut in cuts],
        hangs=[(rank, i, cut.seconds) for rank, i, cut in cuts if cut.end == "hang"],
    )


def _starts(ordered: Sequence[durations.Value]) -> list[list[float]]:
    """Return the values after each start as far as they follow one another without a gap."""
    starts: list[list[float]] = []
    for value in ordered:
        if value.j == 0:
            starts.append([])
        if starts and len(starts[-1]) == value.j:
            starts[-1].append(value.s)
    return starts


def _half(periods: dict[int, durations.Period], total: Histogram) -> tuple[float, float]:
    """Return the maximum of the first half of the occurrences, and the drift from first to last third."""
    largest, seen = 0.0, 0
    thirds = [Histogram(), Histogram(), Histogram()]
    for number in sorted(periods):
        histogram = periods[number].histogram
        if seen < total.count / 2 or not largest:
            largest = max(largest, histogram.max)
        thirds[min(2, int(3 * seen / max(1, total.count)))].merge(histogram)
        seen += histogram.count
    first, last = thirds[0], thirds[2]
    drift = math.log(median(last) / median(first)) if min(first.count, last.count) >= 10 else 0.0
    return largest, drift


def median(histogram: Histogram) -> float:
    """Return the middle of a histogram, in seconds."""
    return quantile(_descending(histogram), 0.5)


def _descending(histogram: Histogram) -> list[tuple[float, int]]:
    return [(upper_bound(number), histogram.buckets[number]) for number in sorted(histogram.buckets, reverse=True)]


# -- what the fit needs ----------------------------------------------------------------------------


def pool(seen: Sequence[Observed], warm_up: int) -> Pool:
    """Put the runs of one deadline together, without each start's first `warm_up` occurrences."""
    whole = [[s for start in each.starts for s in start[warm_up:]] for each in seen if each.is_whole]
    parts = [each for each in seen if not each.is_whole]
    if not parts:
        return pooled(whole)
    base = pooled(whole)
    counts: dict[float, int] = dict(base.descending)
    medians, drifts, first_half = list(base.run_medians), [base.drift] if whole else [], base.first_half_max
    for each in parts:
        left = max(0, each.n - len(each.tail) - warm_up * len(each.starts))
        below = [(value, count) for value, count in _descending(each.body) if value <= each.above]
        ranks = sum(count for _, count in below)
        for value, count in below:
            share = round(count * left / ranks)
            if share:
                counts[value] = counts.get(value, 0) + share
        for value in each.tail:
            counts[value] = counts.get(value, 0) + 1
        medians.append(median(each.body))
        drifts.append(each.drift)
        first_half = max(first_half, each.first_half_max)
    return Pool(
        descending=tuple(sorted(counts.items(), reverse=True)),
        run_medians=tuple(medians),
        drift=sorted(drifts)[len(drifts) // 2],
        first_half_max=first_half,
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


__all__ = ["COLUMNS", "End", "Input", "Observed", "Run", "median", "pool", "read"]
