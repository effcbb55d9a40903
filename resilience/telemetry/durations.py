"""What did each section, step and heartbeat of a rank take?  The one record of durations in a run folder.

Two files a rank, kept by its monitor. `timings/<node>-<rank>.hist` is replaced as a whole. It holds every duration in
buckets of 1 %, with exact count, sum and maximum, and a short summary of each stretch of time.
`timings/<node>-<rank>.jsonl` is appended to and holds single values: the first ones after each start, large ones, and
every occurrence that was cut off. It is a sample. The histogram is complete, so nothing is lost where the sample ends.
Both files stay small for any length of run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from resilience.adapters.background import READ_LIMIT, WRITER, BackgroundFile
from resilience.core import encoding
from resilience.core.configuration import Configuration
from resilience.core.deadlines import EARLY, HEARTBEAT, Start, section_of
from resilience.errors import DecodeError
from resilience.telemetry import timings
from resilience.telemetry.timings import LARGEST_BUCKET, Count, Duration, Histogram, Timings, upper_bound

End = Literal["ok", "cut", "killed", "hang"]
Wall = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]  # seconds

FIRST = 64  # occurrences after the first start that are kept one by one
FIRST_AGAIN = EARLY  # after each further start
TAIL_SHARE = 0.01  # of all values that are kept one by one, until there are TAIL_VALUES
TAIL_VALUES = 250  # then the largest so many of all, about
MOST_VALUES = 4_000  # lines of a file, besides starts and cut-offs: below 512 KiB
MOST_LINES = 6_000  # of a file in all
PERIOD = 10.0  # seconds of a period, until there are more than PERIODS
PERIODS = 64


class Header(msgspec.Struct, frozen=True, tag="header", tag_field="kind"):
    """Whose durations these are. launch: equal in all folders of one launch, on whatever disks."""

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
    """One occurrence of a deadline. i: its number in the run; j: since the last start; t: wall seconds of its
    beginning; s: seconds, of one that was killed up to the moment at which its limit fired."""

    section: str
    i: int
    j: int
    t: Wall
    s: Duration
    end: End = "ok"


class Period(msgspec.Struct):
    """All durations of a stretch of time. max_at: wall seconds of the maximum. median: within 1 % if the period was
    recorded in one piece. settled: how many came later than FIRST_AGAIN after a start; settled_max: their maximum."""

    count: Count = 0
    sum: Duration = 0.0
    max: Duration = 0.0
    max_at: Wall = 0.0
    median: Duration = 0.0
    settled: Count = 0
    settled_max: Duration = 0.0

    def merge(self, other: Period) -> None:
        """Add a neighbour."""
        if other.max > self.max:
            self.max, self.max_at = other.max, other.max_at
        self.median = _between(self.median, self.count, other.median, other.count)
        self.count += other.count
        self.sum += other.sum
        self.settled += other.settled
        self.settled_max = max(self.settled_max, other.settled_max)


class Series(msgspec.Struct, omit_defaults=True):
    """All durations of one deadline. early: those of `total` that were among the FIRST_AGAIN first after a start.
    failed: of sections that an exception left."""

    total: Histogram = msgspec.field(default_factory=Histogram)
    early: Histogram = msgspec.field(default_factory=Histogram)
    failed: Histogram = msgspec.field(default_factory=Histogram)
    periods: dict[Count, Period] = {}


class Durations(msgspec.Struct):
    """Everything a rank's `.hist` file holds. period_s: length of a period; numbers count from the first. seconds:
    observed in all. left_out: large values that the file of single values has no room for."""

    header: Header
    began_at: Wall
    period_s: Annotated[float, msgspec.Meta(ge=1.0, le=1e12)] = PERIOD
    deadlines: dict[str, Series] = {}
    seconds: float = 0.0
    left_out: Count = 0

    def timings(self) -> Timings:
        """Return the histograms of sections and heartbeats, as exporters and reports show them."""
        named = {_shown(name): series for name, series in self.deadlines.items()}
        return Timings(
            {name: series.total for name, series in named.items() if name is not None and series.total.count},
            {name: series.failed for name, series in named.items() if name is not None and series.failed.count},
        )


class _Running(msgspec.Struct):
    """What the recorder keeps of one deadline beside its series. now: what was added to the period `number`, which is
    not over. median: of what was in that period before."""

    i: int = 0
    j: int = 0
    threshold: float = 0.0
    number: int = -1
    now: Histogram = msgspec.field(default_factory=Histogram)
    median: float = 0.0


class Recorder:
    """Keeps one rank's durations. Used by one thread, the monitor's."""

    def __init__(self, folder: Path, header: Header, at: float) -> None:
        """folder: the run folder. at: wall seconds now. Goes on with what a monitor before has left there."""
        stem = f"{header.node}-{header.rank}"
        self._values = BackgroundFile(folder / "timings" / f"{stem}.jsonl")
        self._path = folder / "timings" / f"{stem}.hist"
        self._state = Durations(header=header, began_at=at)
        self._running: dict[str, _Running] = {}
        self._starts = 0
        self._kept = 0
        self._lines = 0
        self.dropped = 0
        self._is_changed = False
        with contextlib.suppress(OSError, DecodeError):  # there is nothing, or the disk does not answer
            self._go_on(*WRITER.ask(lambda: _before(self._path, folder / "timings" / f"{stem}.jsonl"), READ_LIMIT))

    @property
    def state(self) -> Durations:
        """All that was recorded so far."""
        return self._state

    @property
    def is_new(self) -> bool:
        """Whether this rank has not started on this node before."""
        return self._starts == 0 and not self._state.deadlines

    def know(self, configuration: Configuration, launch: str) -> None:
        """Note what the run is."""
        self._state.header = msgspec.structs.replace(self._state.header, configuration=configuration, launch=launch)

    def _go_on(self, known: Durations, size: int) -> None:
        """Take over what was kept of the same run. size: of the file of values, in bytes."""
        if known.header.run != self._state.header.run:
            return
        self._state = known
        for name, series in known.deadlines.items():
            self._running[name] = _Running(i=series.total.count, threshold=threshold(series.total))
        self._lines = size // 90  # about; it only bounds the file
        self._kept = self._lines
        self._starts = 1

    def started(self, how: Start, at: float, cycle: int = 0, iteration: int = 0) -> None:
        """A worker, or an iteration of its function, began."""
        self._starts += 1
        for running in self._running.values():
            running.j = 0
        self._write(Started(how, at, cycle, iteration))

    def add(self, name: str, seconds: float, at: float, end: End = "ok", is_failed: bool = False) -> None:
        """An occurrence ended, or was cut off. at: wall seconds of its beginning. is_failed: an exception left it."""
        self._is_changed = True
        series = self._state.deadlines.setdefault(name, Series())
        running = self._running.setdefault(name, _Running())
        first = FIRST if self._starts <= 1 else FIRST_AGAIN
        is_large = seconds > running.threshold > 0.0
        if running.j < first or end != "ok" or is_large:
            if end != "ok" or self._kept < MOST_VALUES:
                self._kept += end == "ok"
                self._write(Value(name, running.i, running.j, round(at, 3), float(f"{seconds:.9g}"), end))
            else:
                self._state.left_out += is_large
        if is_failed:
            series.failed.add(seconds)
        if end == "ok":
            series.total.add(seconds)
            if running.j < FIRST_AGAIN:
                series.early.add(seconds)
            self._add_to_period(name, running, seconds, at)
            if series.total.count % 256 == 0 or series.total.count & (series.total.count - 1) == 0:
                running.threshold = threshold(series.total)
        running.i += 1
        running.j += 1

    def median(self, name: str) -> float:
        """Return the middle of all that was added of a deadline, in seconds; 0 of nothing."""
        series = self._state.deadlines.get(name)
        return 0.0 if series is None else median(series.total)

    def flush(self, at: float) -> bool:
        """Write the histograms if anything was added, for they may be another monitor's of this rank; return False if
        that is refused."""
        if not self._is_changed:
            return True
        self._state.seconds = max(0.0, at - self._state.began_at)
        for name, running in self._running.items():
            self._settle(name, running)
        self._is_changed = not WRITER.replace(self._path, encoding.to_json(self._state))
        return not self._is_changed

    def close(self, at: float) -> None:
        self.flush(at)
        self._values.close()
        self.dropped += self._values.take_lost()

    def _add_to_period(self, name: str, running: _Running, seconds: float, at: float) -> None:
        state = self._state
        number = max(0, int((at - state.began_at) // state.period_s))
        while number >= PERIODS:
            self._double()
            number = int((at - state.began_at) // state.period_s)
        period = state.deadlines[name].periods.setdefault(number, Period())
        if number != running.number:
            self._settle(name, running)
            running.number, running.now, running.median = number, Histogram(), period.median
        running.now.add(seconds)
        period.count += 1
        period.sum += seconds
        if seconds >= period.max:
            period.max, period.max_at = seconds, at
        if running.j >= FIRST_AGAIN:
            period.settled += 1
            period.settled_max = max(period.settled_max, seconds)

    def _settle(self, name: str, running: _Running) -> None:
        """Note the median of the period that is under way."""
        period = self._state.deadlines[name].periods.get(running.number)
        if period is not None and running.now.count:
            before = period.count - running.now.count
            period.median = _between(running.median, before, median(running.now), running.now.count)

    def _double(self) -> None:
        """Make periods twice as long, two of them one."""
        self._state.period_s *= 2
        for name, series in self._state.deadlines.items():
            self._settle(name, self._running[name])
            merged: dict[int, Period] = {}
            for number, period in series.periods.items():
                merged.setdefault(number // 2, Period()).merge(period)
            series.periods = merged
            self._running[name].number = -1

    def _write(self, line: Header | Started | Value) -> None:
        if self._lines == 0 and not isinstance(line, Header):
            self._write(self._state.header)
        if self._lines >= MOST_LINES:
            self.dropped += 1
            return
        self._lines += 1
        self.dropped += not self._values.write(encoding.to_json(line) + b"\n")


def threshold(histogram: Histogram) -> float:
    """Return above which duration a value is worth keeping: p99, later the largest TAIL_VALUES."""
    share = min(TAIL_SHARE, TAIL_VALUES / max(1, histogram.count))
    above = histogram.count * share
    for number in sorted(histogram.buckets, reverse=True):
        above -= histogram.buckets[number]
        if above < 0:
            return upper_bound(min(number, LARGEST_BUCKET))
    return 0.0


def median(histogram: Histogram) -> float:
    """Return the middle of a histogram in seconds, 0 of nothing."""
    above = histogram.count / 2
    for number in sorted(histogram.buckets, reverse=True):
        above -= histogram.buckets[number]
        if above < 0:
            return upper_bound(number)
    return 0.0


def _between(first: float, count: int, second: float, more: int) -> float:
    """Return the median of two stretches of time together, about: medians differ little, so their mean by count."""
    if count <= 0 or first <= 0.0:
        return second
    if more <= 0 or second <= 0.0:
        return first
    return math.exp((count * math.log(first) + more * math.log(second)) / (count + more))


def _shown(deadline: str) -> str | None:
    """Return the name of a deadline in exports and reports, None if it is not shown there."""
    return timings.HEARTBEAT if deadline == HEARTBEAT else section_of(deadline)


_line = encoding.reader(Header | Started | Value)
_lines = encoding.lines_reader(Header | Started | Value)
_histograms = encoding.reader(Durations)


def read_values(path: Path) -> Iterator[tuple[int, Header | Started | Value]]:
    """Yield (line number, line) of a file of single values; a torn last line is left out.

    Raises: OSError, DecodeError with the number of the line in front."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                yield number, _line(text)
            except DecodeError as error:
                raise DecodeError(f"line {number}: {error}") from error


def read_lines(path: Path) -> list[Header | Started | Value]:
    """Return what `read_values` yields, much faster. Raises: OSError, DecodeError with the number of the line."""
    whole, newline, _ = path.read_bytes().rpartition(b"\n")
    try:
        return _lines(whole + newline)
    except DecodeError:
        return [line for _, line in read_values(path)]


def read_histograms(path: Path) -> Durations:
    """Read a file of histograms. Raises: OSError, DecodeError."""
    return _histograms(path.read_bytes())


def _before(histograms: Path, values: Path) -> tuple[Durations, int]:
    """Return what an earlier recorder has left, and the size of its values. Raises: OSError, DecodeError."""
    return read_histograms(histograms), values.stat().st_size if values.exists() else 0
