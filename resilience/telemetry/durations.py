"""How long did each section, step and heartbeat of a rank take?  The record of durations in a run folder.

Two files per rank, written by its monitor. `timings/<node>-<rank>.hist` is replaced as a whole. It holds all durations
in buckets of 1 %, with exact count, sum and maximum, and a short summary per period. `timings/<node>-<rank>.jsonl` is
appended to and holds single values: the first ones after each start, large ones, and every occurrence that was cut off.
This file is a sample; the histogram is complete, so nothing is lost where the sample ends. Both files stay small for
any length of run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from resilience.errors import DecodeError
from resilience.facts import encoding
from resilience.facts.configuration import Configuration
from resilience.facts.deadlines import EARLY, HEARTBEAT, Start, section_of
from resilience.facts.identity import FileOwner
from resilience.system import files
from resilience.system.background import LAST_STALL, READ_LIMIT, WRITER, BackgroundFile
from resilience.telemetry import timings
from resilience.telemetry.timings import LARGEST_BUCKET, Count, Duration, Histogram, Timings, upper_bound

End = Literal["ok", "cut", "killed", "hang"]
Wall = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]  # seconds

FIRST = 64  # occurrences after the first start that are kept individually
FIRST_AGAIN = EARLY  # after each further start
TAIL_SHARE = 0.01  # of all values kept individually, until there are TAIL_VALUES
TAIL_VALUES = 250  # then about this many of the largest values
MOST_VALUES = 4_000  # lines of a file, besides starts and cut-offs: less than 512 KiB
MOST_LINES = 6_000  # of a file in all
UNREADABLE = ".unreadable"  # suffix of a file of histograms that cannot be decoded
PERIOD = 10.0  # seconds of a period, until there are more than PERIODS
PERIODS = 64
MOST_UNWRITTEN = 20_000  # additions that are remembered until they are written; a monitor writes every 15 s
REREAD_LIMIT = 0.2  # seconds for a file that could not be read at the start: the monitor's loop waits for it


class Header(msgspec.Struct, frozen=True, tag="header", tag_field="kind"):
    """The rank that the durations belong to. launch: equal in all folders of one launch, on all disks."""

    run: str
    node: str
    rank: int
    world_size: int
    configuration: Configuration = Configuration()
    launch: str = ""
    schema: int = 2


class Started(msgspec.Struct, frozen=True, tag="start", tag_field="kind"):
    """The rank started (again): occurrences after it are counted from 0. at: wall seconds."""

    how: Start
    at: Wall
    cycle: int = 0
    iteration: int = 0


class Value(msgspec.Struct, frozen=True, omit_defaults=True, tag="value", tag_field="kind"):
    """One occurrence of a deadline. i: its number in the run; j: its number since the last start; t: wall seconds of
    its start; s: duration in seconds; if the rank was killed, until its limit fired."""

    section: str
    i: int
    j: int
    t: Wall
    s: Duration
    end: End = "ok"


class Period(msgspec.Struct):
    """All durations of a period. max_at: wall seconds of the maximum. median: within 1 % if the period was recorded
    in one piece. settled: number of occurrences after the FIRST_AGAIN first of a start; settled_max: their maximum."""

    count: Count = 0
    sum: Duration = 0.0
    max: Duration = 0.0
    max_at: Wall = 0.0
    median: Duration = 0.0
    settled: Count = 0
    settled_max: Duration = 0.0

    def merge(self, other: Period) -> None:
        """Add an adjacent period."""
        if other.max > self.max:
            self.max, self.max_at = other.max, other.max_at
        self.median = _merged_median(self.median, self.count, other.median, other.count)
        self.count += other.count
        self.sum += other.sum
        self.settled += other.settled
        self.settled_max = max(self.settled_max, other.settled_max)


class Series(msgspec.Struct, omit_defaults=True):
    """All durations of one deadline. early: those of `total` among the FIRST_AGAIN first after a start. failed: of
    sections that an exception left."""

    total: Histogram = msgspec.field(default_factory=Histogram)
    early: Histogram = msgspec.field(default_factory=Histogram)
    failed: Histogram = msgspec.field(default_factory=Histogram)
    periods: dict[Count, Period] = {}

    def merge(self, other: Series) -> None:
        """Add another series' histograms; its periods may be other ones."""
        self.total.merge(other.total)
        self.early.merge(other.early)
        self.failed.merge(other.failed)


class Durations(msgspec.Struct):
    """The content of a rank's `.hist` file. period_s: length of a period; periods count from the first. seconds: total
    observed time. left_out: healthy values that did not fit into the file of single values, in general only large ones.
    lines_left_out: starts and cut-offs that did not fit. first_step: number of the first step after the cold start,
    None if the program reported no steps."""

    header: Header
    began_at: Wall
    period_s: Annotated[float, msgspec.Meta(ge=1.0, le=1e12)] = PERIOD
    deadlines: dict[str, Series] = {}
    seconds: float = 0.0
    left_out: Count = 0
    lines_left_out: Count = 0
    first_step: int | None = None

    def number_of(self, at: float) -> int:
        """Return the number of the period at a time, in wall seconds."""
        return max(0, int((at - self.began_at) // self.period_s))

    def double_periods(self) -> None:
        """Double the period length by merging pairs of periods."""
        self.period_s *= 2
        for series in self.deadlines.values():
            merged: dict[int, Period] = {}
            for number, period in series.periods.items():
                merged.setdefault(number // 2, Period()).merge(period)
            series.periods = merged

    def merge(self, later: Durations) -> None:
        """Add what was recorded later for the same rank."""
        last = max((number for series in later.deadlines.values() for number in series.periods), default=0)
        while self.period_s < later.period_s or self.number_of(later.began_at + last * later.period_s) >= PERIODS:
            self.double_periods()
        for name, series in later.deadlines.items():
            own = self.deadlines.setdefault(name, Series())
            own.merge(series)
            for number, period in series.periods.items():
                at = later.began_at + number * later.period_s
                own.periods.setdefault(self.number_of(at), Period()).merge(period)
        self.left_out += later.left_out
        self.lines_left_out += later.lines_left_out
        if self.first_step is None:
            self.first_step = later.first_step

    def sections(self) -> list[str]:
        """Return the names of the rank's sections, in the order in which they first ended."""
        return [section for name in self.deadlines if (section := section_of(name)) is not None]

    def timings(self) -> Timings:
        """Return the histograms of sections and heartbeats for exporters and reports."""
        named = {_export_name(name): series for name, series in self.deadlines.items()}
        return Timings(
            {name: series.total for name, series in named.items() if name is not None and series.total.count},
            {name: series.failed for name, series in named.items() if name is not None and series.failed.count},
        )


class _Running(msgspec.Struct):
    """The recorder's state for one deadline, besides its series. now: values added to the open period `number`.
    median: of the values that were in that period before."""

    i: int = 0
    j: int = 0
    threshold: float = 0.0
    number: int = -1
    now: Histogram = msgspec.field(default_factory=Histogram)
    median: float = 0.0


class _Addition(NamedTuple):
    """A counted occurrence. at: wall seconds of its start. j: its number since the last start."""

    name: str
    seconds: float
    at: float
    j: int
    is_ok: bool
    is_failed: bool


class Recorder:
    """Records one rank's durations. Used by the monitor's thread only.

    Two monitors of a rank may share the files: the launcher's one, and that of a Wrapper whose call the launcher's one
    sits out. So a file that somebody else has written since is read again, and what is new here is added to it."""

    def __init__(self, folder: Path, header: Header, at: float) -> None:
        """folder: the run folder. at: wall seconds now. Continues the files of an earlier monitor."""
        stem = FileOwner(header.node, header.rank).name
        self._values = BackgroundFile(folder / "timings" / f"{stem}.jsonl")
        self._path = folder / "timings" / f"{stem}.hist"
        self._state = Durations(header=header, began_at=at)
        self._running: dict[str, _Running] = {}
        self._starts = 0
        self._kept = 0
        self._lines = 0
        self.dropped = 0
        self._is_changed = False
        self._is_configured = False
        self._is_earlier_known = False  # what an earlier monitor's files hold
        self._is_outdated = False  # another monitor has written the file since
        self._unreadable = ""
        self._signature: files.Signature | None = None  # of the file as it was last read or written here
        self._unwritten: deque[_Addition] = deque(maxlen=MOST_UNWRITTEN)  # and some that were written
        self._added = self._written = 0  # number of additions
        self._find_earlier(READ_LIMIT)

    @property
    def state(self) -> Durations:
        """Return everything recorded so far."""
        return self._state

    @property
    def is_new(self) -> bool:
        """Return True if this rank has not started on this node before."""
        return self._starts == 0 and not self._state.deadlines

    def take_unreadable(self) -> str:
        """Return the name of the file that keeps earlier histograms that cannot be decoded, once; empty if none."""
        unreadable, self._unreadable = self._unreadable, ""
        return unreadable

    @property
    def recorded(self) -> int:
        """Return how many occurrences ended well, of all deadlines."""
        return sum(series.total.count for series in self._state.deadlines.values())

    def continue_count(self, since_start: Mapping[str, int], recorded: int) -> int:
        """Count on where another recorder stopped. Return how many occurrences it did not write. since_start: its
        occurrences since the last start. recorded: those of its whole life that ended well."""
        lost = max(0, recorded - self.recorded) if self._is_earlier_known else 0
        for name, count in since_start.items():
            self._state.deadlines.setdefault(name, Series())
            running = self._running.setdefault(name, _Running())
            running.i, running.j = max(running.i, count), count
        return lost

    def know(self, configuration: Configuration, launch: str) -> None:
        """Set the run's configuration and launch."""
        self._state.header = msgspec.structs.replace(self._state.header, configuration=configuration, launch=launch)
        self._is_configured = True

    def _find_earlier(self, limit: float, is_last: bool = False) -> bool:
        """Continue the files of another monitor if there are any. Return False if they cannot be read now, within
        `limit` seconds: then they must not be replaced. is_last: a full queue does not matter."""
        if self._is_earlier_known and not self._is_outdated:
            return True
        own_values = self._path.with_suffix(".jsonl")
        try:
            earlier_files = WRITER.ask(lambda: _earlier_files(self._path, own_values), limit, is_last)
        except OSError:
            return False
        self._signature, self._unreadable = earlier_files.signature, earlier_files.unreadable or self._unreadable
        if not self._is_earlier_known and earlier_files.size:
            self._continue_values(earlier_files.size)
        earlier = earlier_files.histograms
        if earlier is not None and earlier.header.run == self._state.header.run:
            if self._is_earlier_known:
                self._continue_with(earlier)
            else:
                self._continue_from(earlier)
        self._is_earlier_known, self._is_outdated = True, False
        return True

    def _continue_with(self, other: Durations) -> None:
        """Add what is new here to what another monitor has written, which holds all that was written here."""
        self._forget_written()
        if self._is_configured:
            other.header = self._state.header
        self._state = other
        for name, running in self._running.items():
            total = other.deadlines.setdefault(name, Series()).total
            running.number, running.threshold = -1, threshold(total)
            running.i = max(running.i, total.count + sum(new.name == name for new in self._unwritten))
        for new in self._unwritten:
            self._count(new)

    def _forget_written(self) -> None:
        while len(self._unwritten) > self._added - self._written:
            self._unwritten.popleft()

    def _continue_values(self, size: int) -> None:
        """Append to the file of values. size: in bytes."""
        self._lines = max(self._lines, 1, size // 90)  # an estimate, which only limits the file's size
        self._kept = self._lines
        self._starts += 1

    def _continue_from(self, earlier: Durations) -> None:
        """Put the earlier records of the same run before the present ones."""
        later = self._state
        for name, running in self._running.items():
            self._update_median(name, running)
        for name, series in earlier.deadlines.items():
            self._running.setdefault(name, _Running()).i += series.total.count
        earlier.merge(later)
        if self._is_configured:
            earlier.header = later.header
        self._state = earlier
        for name, running in self._running.items():
            running.number = -1
            running.threshold = threshold(earlier.deadlines[name].total)

    def started(self, how: Start, at: float, cycle: int = 0, iteration: int = 0) -> None:
        """Note the start of a worker, or of an iteration of its function."""
        self._starts += 1
        for running in self._running.values():
            running.j = 0
        self._write(Started(how, at, cycle, iteration))

    def add(self, name: str, seconds: float, at: float, end: End = "ok", is_failed: bool = False) -> None:
        """Add an occurrence that ended or was cut off. at: wall seconds of its start. is_failed: by an exception."""
        self._is_changed = True
        running = self._running.setdefault(name, _Running())
        first = FIRST if self._starts <= 1 else FIRST_AGAIN
        is_large = seconds > running.threshold > 0.0
        if running.j < first or end != "ok" or is_large:
            if end != "ok" or self._kept < MOST_VALUES:
                self._kept += end == "ok"
                self._write(Value(name, running.i, running.j, round(at, 3), float(f"{seconds:.9g}"), end))
            else:
                self._state.left_out += is_large
        new = _Addition(name, seconds, at, running.j, end == "ok", is_failed)
        self._added += 1
        self._unwritten.append(new)
        self._count(new)
        running.i += 1
        running.j += 1

    def _count(self, new: _Addition) -> None:
        """Add an occurrence to the histograms."""
        series = self._state.deadlines.setdefault(new.name, Series())
        running = self._running[new.name]
        if new.is_failed:
            series.failed.add(new.seconds)
        if new.is_ok:
            series.total.add(new.seconds)
            if new.j < FIRST_AGAIN:
                series.early.add(new.seconds)
            self._add_to_period(running, new)
            if series.total.count % 256 == 0 or series.total.count & (series.total.count - 1) == 0:
                running.threshold = threshold(series.total)

    def median(self, name: str) -> float:
        """Return the median of a deadline's durations in seconds; 0 if there are none."""
        series = self._state.deadlines.get(name)
        return 0.0 if series is None else median(series.total)

    def flush(self, at: float) -> bool:
        """Write the histograms if any value was added. Return False if the write is refused, or if a file that another
        monitor has written cannot be read yet."""
        return not WRITER.is_stalled and self._flush(at)

    def _flush(self, at: float, is_last: bool = False) -> bool:
        if not self._is_changed and not self._is_outdated:
            return True
        if not self._find_earlier(LAST_STALL if is_last else REREAD_LIMIT, is_last):
            return False
        spent = max((running.total.sum for running in self._state.deadlines.values()), default=0.0)
        self._state.seconds = max(spent, at - self._state.began_at)  # the clock may have been set back
        for name, running in self._running.items():
            self._update_median(name, running)
        self._forget_written()
        content, added = encoding.to_json(self._state), self._added
        self._is_changed = not WRITER.submit(lambda: self._replace(content, added), is_last)
        return not self._is_changed

    def _replace(self, content: bytes, added: int) -> None:
        """Write the file, unless another monitor has done so since. Runs in the writer's thread."""
        present = files.signature(self._path)
        if present is not None and present != self._signature:
            self._is_outdated = True
        elif files.replace(self._path, content):
            self._signature, self._written = files.signature(self._path), added

    def close(self, at: float) -> None:
        """Write everything. A disk that is slow now is waited for: what is not written here is lost."""
        WRITER.flush()  # what is in the queue has more time than what follows
        self._flush(at, is_last=True)
        self._values.close()  # waits for the writer
        if self._is_outdated:
            self._flush(at, is_last=True)
            WRITER.flush()
        self.dropped += self._values.take_lost()

    def _add_to_period(self, running: _Running, new: _Addition) -> None:
        state, name, seconds, at = self._state, new.name, new.seconds, new.at
        while (number := state.number_of(at)) >= PERIODS:
            self._double_periods()
        period = state.deadlines[name].periods.setdefault(number, Period())
        if number != running.number:
            self._update_median(name, running)
            running.number, running.now, running.median = number, Histogram(), period.median
        running.now.add(seconds)
        period.count += 1
        period.sum += seconds
        if seconds >= period.max:
            period.max, period.max_at = seconds, at
        if new.j >= FIRST_AGAIN:
            period.settled += 1
            period.settled_max = max(period.settled_max, seconds)

    def _update_median(self, name: str, running: _Running) -> None:
        """Update the median of the open period."""
        period = self._state.deadlines[name].periods.get(running.number)
        if period is not None and running.now.count:
            earlier_count = period.count - running.now.count
            period.median = _merged_median(running.median, earlier_count, median(running.now), running.now.count)

    def _double_periods(self) -> None:
        for name, running in self._running.items():
            self._update_median(name, running)
            running.number = -1
        self._state.double_periods()

    def _write(self, line: Header | Started | Value) -> None:
        if self._lines == 0 and not isinstance(line, Header):
            self._write(self._state.header)
        if self._lines >= MOST_LINES:
            self.dropped += 1
            is_healthy = isinstance(line, Value) and line.end == "ok"
            self._state.lines_left_out += not is_healthy
            self._state.left_out += is_healthy
            return
        self._lines += 1
        self.dropped += not self._values.write(encoding.to_json(line) + b"\n")


def threshold(histogram: Histogram) -> float:
    """Return the duration above which a value is kept: p99 at first, later the largest TAIL_VALUES."""
    share = min(TAIL_SHARE, TAIL_VALUES / max(1, histogram.count))
    remaining = histogram.count * share
    for number in sorted(histogram.buckets, reverse=True):
        remaining -= histogram.buckets[number]
        if remaining < 0:
            return upper_bound(min(number, LARGEST_BUCKET))
    return 0.0


def median(histogram: Histogram) -> float:
    """Return the median of a histogram in seconds; 0 if it is empty."""
    above = histogram.count / 2
    for number in sorted(histogram.buckets, reverse=True):
        above -= histogram.buckets[number]
        if above < 0:
            return upper_bound(number)
    return 0.0


def _merged_median(first: float, first_count: int, second: float, second_count: int) -> float:
    """Return the approximate median of two periods together: medians differ little, so the mean weighted by count."""
    if first_count <= 0 or first <= 0.0:
        return second
    if second_count <= 0 or second <= 0.0:
        return first
    return math.exp((first_count * math.log(first) + second_count * math.log(second)) / (first_count + second_count))


def _export_name(deadline: str) -> str | None:
    """Return the name of a deadline in exports and reports, None if it does not appear there."""
    return timings.HEARTBEAT if deadline == HEARTBEAT else section_of(deadline)


_histograms = encoding.reader(Durations)


def read_histograms(path: Path) -> Durations:
    """Read a file of histograms. Raises: OSError, DecodeError."""
    return _histograms(path.read_bytes())


class _Earlier(NamedTuple):
    """Another recorder's files. histograms: None without readable ones. size: of the file of values, in bytes.
    unreadable: the name under which histograms that cannot be decoded are kept."""

    signature: files.Signature | None
    histograms: Durations | None
    size: int
    unreadable: str = ""


def _earlier_files(histograms: Path, values: Path) -> _Earlier:
    """Return another recorder's files. Raises: OSError if they may be readable later."""
    signature, size = files.signature(histograms), values.stat().st_size if values.is_file() else 0
    try:
        return _Earlier(signature, read_histograms(histograms), size)
    except (FileNotFoundError, NotADirectoryError):
        return _Earlier(signature, None, size)
    except DecodeError:
        kept = histograms.with_name(histograms.name + UNREADABLE)
        if kept.exists():  # the oldest one says the most
            return _Earlier(signature, None, size)
        histograms.rename(kept)
        return _Earlier(None, None, size, kept.name)
