"""Reads timings of other tools: tables with the columns `run,section,rank,i,seconds` and optionally `end`."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import median

from resilience.calibrate.observed import ObservedCut, ObservedDeadline, ObservedRun, StartValues, Unfinished
from resilience.calibration.recurring_phases import BEGINNING
from resilience.calibration.unended import Cut
from resilience.errors import ConfigurationError
from resilience.facts.configuration import Configuration
from resilience.facts.deadlines import HEARTBEAT, INITIAL_HEARTBEAT, OUT_OF_SECTION, STEP, of_section
from resilience.telemetry import durations

COLUMNS = ("run", "section", "rank", "i", "seconds")
ENDS = ("ok", "cut", "killed", "hang")
DIGITS = 18  # at most, of an occurrence's number; Python refuses to read thousands of them
LONGEST = 1e9  # seconds: 30 years
BOM = "\ufeff"


def read_table(path: Path) -> list[ObservedRun]:
    """Read a table with the columns `run,section,rank,i,seconds[,end]`. Raises: ConfigurationError."""
    values: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    cuts: dict[tuple[str, str], dict[int, Unfinished]] = defaultdict(lambda: defaultdict(Unfinished))
    ranks: dict[str, set[str]] = defaultdict(set)
    by_rank: dict[tuple[str, str], dict[str, array[float]]] = defaultdict(lambda: defaultdict(lambda: array("d")))
    numbers: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for line, row in _rows(path):
        run, section, rank = row["run"], of_table(row["section"]), row["rank"]
        number, seconds = _integer(path, line, row["i"]), _seconds(path, line, row["seconds"])
        if number in numbers[run, section, rank]:
            raise ConfigurationError(
                f"{path}:{line}: run {run!r}, section {section!r}, rank {rank!r} has i={number} twice "
                "(again at this line); continue the count after a restart, or give the part after it another run"
            )
        numbers[run, section, rank].add(number)
        ranks[run].add(rank)
        if row["end"] == "ok":
            by_number = values[run, section]
            by_number[number] = max(seconds, by_number.get(number, 0.0))
            by_rank[run, section][rank].append(seconds)
        else:
            cuts[run, section][number].add(Cut(seconds, row["end"]))  # type: ignore[arg-type]
    killed = {section for section, cut in cuts.items() if any("killed" in known.longest for known in cut.values())}
    sections = values.keys() | killed  # a limit may have ended all occurrences
    if not sections:
        raise ConfigurationError(
            f"{path} contains no durations; expected one per line, with the columns {','.join(COLUMNS)}"
        )
    runs = []
    for run in sorted({run for run, _ in sections}, key=lambda name: (len(name), name)):
        deadlines = {
            section: _whole_series(values[name, section], cuts[name, section], by_rank[name, section].values())
            for name, section in sorted(sections)
            if name == run
        }
        seconds = max(sum(seconds for _, seconds, _ in by_number.kept) for by_number in deadlines.values())
        seconds = seconds or sum(
            max(known.longest.values()) for section in deadlines for known in cuts[run, section].values()
        )
        runs.append(
            ObservedRun(f"{path.name}:{run}", Configuration(table=path.name), len(ranks[run]), seconds, deadlines)
        )
    return runs


def of_table(name: str) -> str:
    """Return the deadline that a table calls by this name, its own name or that of a section."""
    is_ambiguous = name.startswith("section:") and name.endswith(":")
    is_deadline = is_ambiguous or name in (STEP, HEARTBEAT, INITIAL_HEARTBEAT, OUT_OF_SECTION)
    return name if is_deadline else of_section(name)


def _whole_series(
    by_number: dict[int, float], cuts: dict[int, Unfinished], by_rank: Collection[Sequence[float]]
) -> ObservedDeadline:
    """Return the durations in order, counted from 0 as a recorder counts: an occurrence that did not end by itself has
    a number too. A number without a row has none, because tables of other tools may number occurrences by steps.
    by_number: of the slowest rank. by_rank: all of each rank."""
    numbers = sorted({*by_number, *cuts})
    counted = {number: position for position, number in enumerate(numbers)}
    medians = [median(durations_of_rank) for durations_of_rank in by_rank]
    series = {counted[number]: by_number[number] for number in numbers if number in by_number}
    return ObservedDeadline(
        starts=[StartValues("cold", {number: s for number, s in series.items() if number < durations.FIRST})],
        kept=[(number, seconds, float(number)) for number, seconds in series.items()],
        n=len(series),
        max_s=max(series.values(), default=0.0),
        is_from_beginning=min(numbers, default=0) <= BEGINNING,
        rank_medians=(min(medians, default=0.0), max(medians, default=0.0)),
        cuts=[
            ObservedCut(cut, counted[number], "cold")
            for number, unfinished in cuts.items()
            for cut in unfinished.counted(by_number.get(number), max(medians, default=0.0))
        ],
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
            if names and names[0].startswith(BOM):
                raise ConfigurationError(
                    f"{path}:1: starts with a byte order mark; save it as UTF-8 without one (utf-8, not utf-8-sig)"
                )
            if tuple(names[:5]) != COLUMNS or names[5:] not in ([], ["end"]):
                raise ConfigurationError(
                    f"{path}:1: the columns are {','.join(names) or 'missing'}, expected {','.join(COLUMNS)}[,end]"
                )
            for row in table:
                line = table.line_num
                if len(row) != len(names):
                    raise ConfigurationError(f"{path}:{line}: {len(row)} fields, expected {len(names)}: {row}")
                if not row[1].strip():
                    raise ConfigurationError(f"{path}:{line}: the section name is empty")
                end = row[5] if len(row) > 5 else "ok"
                if end not in ENDS:
                    raise ConfigurationError(f"{path}:{line}: end is {end!r}, expected one of {', '.join(ENDS)}")
                yield (
                    line,
                    {"run": row[0], "section": row[1], "rank": row[2], "i": row[3], "seconds": row[4], "end": end},
                )
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(
            f"{path}: damaged after line {line + 1} ({error}); copy it again, or omit it"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from error


def _integer(path: Path, line: int, text: str) -> int:
    if not text.isdecimal() or len(text) > DIGITS:
        raise ConfigurationError(
            f"{path}:{line}: i is {text[:40]!r}, expected an integer from 0 with at most {DIGITS} digits"
        )
    return int(text)


def _seconds(path: Path, line: int, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds <= LONGEST:
        raise ConfigurationError(f"{path}:{line}: seconds is {text!r}, expected a number from 0 to {LONGEST:g}")
    return max(seconds, 1e-9)  # a clock with millisecond resolution may show 0
