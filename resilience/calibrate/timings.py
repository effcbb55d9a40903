"""Which durations were observed?  Run folders, timings files and plain tables, read into one form.

A run has deadlines (`facts.deadlines`). For each, the duration of an occurrence is that of the slowest rank, because a
false alarm on any rank restarts the job. A table has every value. A run folder has single values, aligned over ranks by
the start that they follow, and all values in buckets. Values missing among the single ones come from the buckets, so no
duration is lost. Invalid input raises an error with file and line: partial data would give wrong limits."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from resilience.calibrate.cuts import Verdicts
from resilience.calibrate.gathered import Gathered, Place
from resilience.calibrate.observed import ObservedDeadline, ObservedRun
from resilience.calibrate.rank_files import Rank, RankFile, by_rank
from resilience.calibrate.tables import read_table
from resilience.calibration import rank_groups
from resilience.calibration.fitting import FEWEST
from resilience.calibration.limits_file import SourceFile
from resilience.calibration.rank_groups import RankPace
from resilience.errors import ConfigurationError, DecodeError
from resilience.facts.deadlines import Start
from resilience.system import files
from resilience.telemetry import durations, single_durations
from resilience.telemetry.recording import JOB_FILE
from resilience.telemetry.timings import bucket, upper_bound

FRESH = 30.0  # seconds since the last write of a file; a running monitor writes every 15
TABLES = (".csv", ".csv.gz")  # endings of their names
LAST_RECORDS = 8  # of a file, searched for its end


class Input(msgspec.Struct):
    """All observed runs. notes: remarks for the user. unmatched: requested sections that no run has."""

    runs: list[ObservedRun]
    sources: list[SourceFile]
    notes: list[str] = []
    unmatched: list[str] = []


Progress = Callable[[str, int, int], None]  # path, number done, total


def read(paths: Sequence[Path], sections: frozenset[str] = frozenset(), progress: Progress | None = None) -> Input:
    """Read run folders (timings of every rank), folders of timings files, and tables (.csv, .csv.gz).

    sections: only these; all if empty. Raises: ConfigurationError with file and line."""
    try:
        return _read(paths, sections, progress)
    except OSError as error:
        if error.filename is None:  # not of an input: the progress could not be written
            raise
        raise ConfigurationError(f"{error.filename} cannot be read: {error.strerror}") from error


def _read(paths: Sequence[Path], sections: frozenset[str], progress: Progress | None) -> Input:
    timings_files: list[RankFile] = []
    tables: list[Path] = []
    sources: list[Path] = []
    notes: list[str] = []
    for number, path in enumerate(paths):
        if progress is not None:
            progress(str(path), number, len(paths))
        if path.resolve() in {earlier.resolve() for earlier in paths[:number]}:
            notes.append(f"{path} is given twice; it counts once")
        elif path.is_dir():
            folder = path / "timings" if (path / "timings").is_dir() else path
            timings_of_path, tables_of_path, files_of_path = _folder(folder, notes)
            timings_files += timings_of_path
            tables += tables_of_path
            sources += files_of_path
        elif path.name.endswith(TABLES):
            tables.append(path)
        elif path.suffix == ".hist":
            timings_of_path, files_of_path = _files([path], notes)
            timings_files += timings_of_path
            sources += files_of_path
        else:
            raise ConfigurationError(
                f"{path} is neither a run folder nor a table (.csv, .csv.gz) nor a timings file (.hist); the run "
                "folder is the one that contains job.json"
                if path.exists()
                else f"{path} does not exist; a run folder, a table or a timings file was expected"
            )
    if progress is not None:
        progress("", len(paths), len(paths))
    tables = _distinct(tables, notes)
    sources += tables
    runs = [*_runs(timings_files, notes), *(run for table in tables for run in read_table(table))]
    unmatched = sorted(sections - {name for run in runs for name in run.deadlines})
    for run in runs:
        if sections:
            run.excluded = frozenset(run.deadlines) - sections
            run.deadlines = {name: deadline for name, deadline in run.deadlines.items() if name in sections}
    read_from = [SourceFile(str(file), files.sha256(file)) for file in sources]
    return Input(runs, read_from, [*notes, *_unfinished(sources)], unmatched)


def _distinct(tables: Sequence[Path], notes: list[str]) -> list[Path]:
    """Return the tables, each content once, in the order of their names: a table does not say when a run began."""
    by_content: dict[str, Path] = {}
    for path in sorted(tables, key=lambda path: (path.name, str(path))):
        earlier = by_content.setdefault(files.sha256(path), path)
        if earlier is not path:
            notes.append(f"{path} has the same content as {earlier}; it counts once")
    return list(by_content.values())


def _unfinished(sources: Sequence[Path]) -> list[str]:
    """Return notes on runs that are still being written, whose data are incomplete."""
    fresh = {
        file.parent.parent for file in sources if file.suffix == ".hist" and time.time() - file.stat().st_mtime < FRESH
    }
    growing = sorted(folder for folder in fresh if not _is_over(folder))
    return [f"{folder} is still being written; its current contents are used" for folder in growing]


def _has_just_begun(folder: Path) -> bool:
    """Return True if this is the folder of a run that began so recently that its timings need not be written yet."""
    try:
        age = time.time() - (folder / JOB_FILE).stat().st_mtime
    except OSError:
        return False
    return age < FRESH and not _is_over(folder)


def _is_over(folder: Path) -> bool:
    """Return True if the records of all ranks and agents contain their end."""
    last = [files.tail(path, LAST_RECORDS) for path in (folder / "records").glob("*.jsonl")]
    return bool(last) and all(map(_has_ended, last))


def _has_ended(records: Sequence[str]) -> bool:
    """Return True if these last records contain an end. A few records may follow it; a new start cancels it."""
    for record in reversed(records):
        if '"monitor.ended"' in record or '"job.ended"' in record:
            return True
        if '"monitor.started"' in record:
            return False
    return False


# -- run folders -----------------------------------------------------------------------------------


def _folder(folder: Path, notes: list[str]) -> tuple[list[RankFile], list[Path], list[Path]]:
    """Return the files of ranks in a folder, its tables, and the paths of all files that were read."""
    names = sorted(folder.iterdir())  # not glob, which shows an unreadable folder as empty
    histograms = [path for path in names if path.suffix == ".hist"]
    tables = [path for path in names if path.name.endswith(TABLES)]
    unreadable = [path for path in names if path.name.endswith(f".hist{durations.UNREADABLE}")]
    notes += [f"{path} was damaged when the run continued it, and is left out" for path in unreadable]
    if histograms:
        timings_files, read_files = _files(histograms, notes)
        notes += [
            f"{path} is not read, because its folder contains timings files; name it to include it" for path in tables
        ]
        return timings_files, [], read_files
    if tables:
        return [], tables, []
    run = folder.parent if folder.name == "timings" else folder
    if _has_just_begun(run):
        raise ConfigurationError(
            f"{run} contains no timings yet: the run has just begun, and they are written every 15 s. Try again later"
        )
    raise ConfigurationError(
        f"{folder} contains no timings. A run records them if it uses sections, heartbeats or steps. Is this the run "
        "folder, and did the run use any of them?"
    )


def _files(paths: Sequence[Path], notes: list[str]) -> tuple[list[RankFile], list[Path]]:
    """Read the histograms of ranks."""
    timings_files: list[RankFile] = []
    used: list[Path] = []
    for path in paths:
        try:
            state = durations.read_histograms(path)
        except DecodeError as error:
            raise ConfigurationError(f"{path}: {error}; not a timings file, or damaged") from error
        single = path.with_suffix(".jsonl")
        timings_files.append(RankFile(state, single))
        used.append(path)
        if single.exists():
            used.append(single)
        elif any(series.total.count for series in state.deadlines.values()):
            notes.append(f"{single} is missing: when its durations occurred, and the first ones, are unknown")
    return timings_files, used


def _runs(timings_files: Sequence[RankFile], notes: list[str]) -> list[ObservedRun]:
    """Combine the files of each rank and the ranks of each run. Name and launch identify a run: the folders of several
    nodes are one run, and a copied or repeated folder counts once."""
    by_run: dict[tuple[str, str], dict[tuple[str, int, float], RankFile]] = defaultdict(dict)
    for file in timings_files:
        header = file.state.header
        known_files = by_run[header.run, header.launch]
        key = (header.node, header.rank, file.state.began_at)
        if key not in known_files:
            known_files[key] = file
        elif known_files[key].folder != file.folder:
            notes.append(f"{file.folder} contains run {header.run} again; it counts once")
    ranks = [by_rank(list(members.values())) for members in by_run.values()]
    groups = _groups(ranks)
    runs = [_run(name, members, groups, notes) for (name, _), members in zip(by_run, ranks, strict=True)]
    return sorted(runs, key=lambda run: (run.began_at, run.name))


_Groups = dict[str, list[tuple[int, ...]]]  # by deadline, where there is more than one


def _groups(runs: Sequence[Sequence[Rank]]) -> _Groups:
    """Return the groups of similar ranks of each deadline over all runs. A rank that some runs lack is in no group."""
    medians: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    longest: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for ranks in runs:
        for rank in ranks:
            for deadline in rank.deadlines:
                total = rank.total(deadline)
                if total.count >= FEWEST:
                    medians[deadline][rank.number].append(durations.median(total))
                    settled = (period.settled_max for _, period in rank.periods(deadline))
                    longest[deadline][rank.number].append(max(settled, default=0.0))
    by_deadline: _Groups = {}
    for deadline, rank_medians in medians.items():
        paces = {
            rank: RankPace(tuple(pace_medians), min(longest[deadline][rank]) if len(runs) > 1 else 0.0)
            for rank, pace_medians in rank_medians.items()
            if len(pace_medians) == len(runs) and min(pace_medians) > 0.0
        }
        groups = rank_groups.split(paces)
        if len(groups) > 1:
            by_deadline[deadline] = groups
    return by_deadline


def _run(name: str, ranks: list[Rank], groups: _Groups, notes: list[str]) -> ObservedRun:
    headers = [file.state.header for rank in ranks for file in rank.files]
    names = sorted({deadline for rank in ranks for deadline in rank.deadlines})
    gathered = {deadline: Gathered.of(deadline, ranks) for deadline in names}
    of_groups = {
        deadline: {members: Gathered.of(deadline, _among(ranks, members)) for members in groups.get(deadline, ())}
        for deadline in names
    }
    verdicts = Verdicts([file.folder for rank in ranks for file in rank.files])
    for rank in ranks:
        of_rank = {
            deadline: [collected, *(group for members, group in of_groups[deadline].items() if rank.number in members)]
            for deadline, collected in gathered.items()
        }
        _gather(rank, of_rank, verdicts, notes)
    for deadline, by_group in of_groups.items():
        if by_group:  # the slowest rank of each occurrence is one of the slowest group
            slowest = max(by_group.values(), key=lambda group: group.median)
            whole = gathered[deadline]
            whole.body = msgspec.structs.replace(slowest.body, max=whole.body.max)
            whole.first_buckets = slowest.first_buckets
    if (observed_s := max(rank.seconds for rank in ranks)) <= 0.0:  # no rate of occurrences is known
        path = ranks[0].files[0].path.with_suffix(".hist")
        raise ConfigurationError(f"{path}: damaged: it has durations, but no observed time; copy it again, or omit it")
    world_size = max(header.world_size for header in headers)
    if len(ranks) < world_size:
        notes.append(
            f"{ranks[0].files[0].folder}: {len(ranks)} of {world_size} ranks have timings; the others recorded none, "
            "or their files are elsewhere"
        )
    if lines_left_out := sum(file.state.lines_left_out for rank in ranks for file in rank.files):
        notes.append(
            f"{ranks[0].files[0].folder}: files of single values are full, so {lines_left_out} later starts, or "
            "occurrences that did not end by themselves, are unknown"
        )
    return ObservedRun(
        name=name,
        configuration=headers[0].configuration,
        ranks=len(ranks),
        world_size=world_size,
        began_at=min(file.state.began_at for rank in ranks for file in rank.files),
        seconds=observed_s,
        deadlines={deadline: collected.observed() for deadline, collected in gathered.items()},
        groups={
            deadline: {rank_groups.named(members): group.observed() for members, group in collected.items()}
            for deadline, collected in of_groups.items()
            if collected
        },
    )


def _among(ranks: Sequence[Rank], members: tuple[int, ...]) -> list[Rank]:
    return [rank for rank in ranks if rank.number in members]


def _gather(rank: Rank, gathered: Mapping[str, Sequence[Gathered]], verdicts: Verdicts, notes: list[str]) -> None:
    """Align a rank's single values with those of the others, and find what its histograms have beyond them. gathered:
    by deadline, all collections that this rank belongs to."""
    totals = {deadline: rank.total(deadline) for deadline in rank.deadlines}
    large = {
        deadline: [
            {number: count for number, count in total.buckets.items() if upper_bound(number) > collected.above}
            for collected in gathered[deadline]
        ]
        for deadline, total in totals.items()
    }
    early = {deadline: rank.early(deadline) for deadline in totals}
    listed = set()
    for place, start_kind, line in (value for file in rank.files for value in _single_values(file, notes)):
        if line.section in gathered:
            if line.end != "ok":
                for collected in gathered[line.section]:
                    cut = verdicts.judged(rank.number, place[:2], line, collected.usual_s)
                    collected.add_cut(place, start_kind, line.j, cut)
                continue
            number = bucket(line.s)
            for counts in large.get(line.section, ()):
                if number in counts:  # a damaged file may have values that its histogram lacks
                    counts[number] -= 1
            if line.j < durations.FIRST_AGAIN and line.section in early:
                early[line.section][number] -= 1
                listed.add(line.section)
            for collected in gathered[line.section]:
                collected.take(place, start_kind, line)
    for deadline, total in totals.items():  # without any single value nothing shows which occurrences are slower
        # A damaged file may have occurrences that its histogram lacks.
        unnumbered = early[deadline] & Counter(total.buckets) if deadline in listed else {}
        for collected, counts in zip(gathered[deadline], large[deadline], strict=True):
            collected.add_rank(total, counts, unnumbered)


def _single_values(file: RankFile, notes: list[str]) -> Iterator[tuple[Place, Start, durations.Value]]:
    """Yield the single values of a file, each with its start; note how many are cut off. Raises: ConfigurationError."""
    place: Place = (0, 0, 0)
    earlier: Counter[tuple[int, int]] = Counter()  # each call of a wrapped function begins with iteration 0
    start_kind: Start = "cold"
    try:
        lines, cut_off = single_durations.read_lines(file.path)
    except FileNotFoundError:
        return
    except (OSError, DecodeError) as error:
        raise ConfigurationError(f"{file.path}: {error}") from error
    if cut_off:
        lines_cut_off = "1 line was" if cut_off == 1 else f"{cut_off} lines were"
        notes.append(f"{file.path}: {lines_cut_off} cut off, as by a full disk; the histogram has these durations")
    for line in lines:
        if isinstance(line, durations.Started):
            start = (line.cycle, line.iteration)
            place, start_kind = (*start, earlier[start]), line.how
            earlier[start] += 1
        elif isinstance(line, durations.Value):
            yield place, start_kind, line


__all__ = ["Input", "ObservedDeadline", "ObservedRun", "read"]
