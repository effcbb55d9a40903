"""What a rank's timings file holds, so that limits can be learned from it.

Two files a rank, kept by its monitor: `timings/<node>-<rank>.jsonl` is appended to and holds single
values (the first calls after each start, what lies above the running 99th percentile, every cut-off)
and the starts; `timings/<node>-<rank>.hist` is replaced as a whole and holds everything, in buckets of
1 % and in periods of equal length, with exact count, sum and maximum. Both stay small for any length of
run: values are kept the more sparingly the more there are, periods are doubled when there are many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from resilience.adapters import files
from resilience.adapters.files import LineFile
from resilience.core import encoding
from resilience.errors import DecodeError
from resilience.telemetry.timings import LARGEST_BUCKET, Count, Duration, Histogram, upper_bound

End = Literal["ok", "cut", "killed", "hang"]
Wall = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]  # seconds
Start = Literal["cold", "warm", "iteration"]

FIRST = 64  # calls after the first start that are kept one by one
FIRST_AGAIN = 16  # after each further start
TAIL_SHARE = 0.01  # of all values that are kept one by one, until there are TAIL_VALUES
TAIL_VALUES = 500  # then the largest so many of all, about
MOST_VALUES = 12_000  # lines of a file: below 1 MiB
PERIOD = 3600.0  # seconds of a period, until there are more than PERIODS
PERIODS = 64


class Header(msgspec.Struct, frozen=True, tag="header", tag_field="kind"):
    """Whose timings these are. fingerprint: of the configuration; only equal ones are pooled."""

    run: str
    node: str
    rank: int
    world_size: int
    fingerprint: str
    config: dict[str, str] = {}
    schema: int = 1


class Started(msgspec.Struct, frozen=True, tag="start", tag_field="kind"):
    """The rank started (again): calls after it are counted from 0. at: wall seconds."""

    how: Start
    at: Wall
    cycle: int = 0
    iteration: int = 0


class Value(msgspec.Struct, frozen=True, omit_defaults=True, tag="value", tag_field="kind"):
    """One occurrence. i: its number in the run; j: since the last start; t: wall seconds of its beginning;
    s: seconds."""

    section: str
    i: int
    j: int
    t: Wall
    s: Duration
    end: End = "ok"


class Period(msgspec.Struct):
    """All durations of a stretch of time. max_at: wall seconds of the maximum."""

    histogram: Histogram
    max_at: Wall = 0.0


class Durations(msgspec.Struct):
    """Everything a rank's `.hist` file holds. period_s: length of a period; numbers count from the first."""

    header: Header
    began_at: Wall
    period_s: Annotated[float, msgspec.Meta(ge=1.0, le=1e12)] = PERIOD
    sections: dict[str, dict[Count, Period]] = {}
    seconds: float = 0.0  # observed in all


class _Section(msgspec.Struct):
    """What the recorder keeps of one section besides its periods."""

    total: Histogram
    i: int = 0
    j: int = 0
    threshold: float = 0.0
    kept: int = 0


class Recorder:
    """Keeps one rank's timings. Used by one thread, the monitor's."""

    def __init__(self, folder: Path, header: Header, at: float) -> None:
        """folder: the run folder. at: wall seconds now. Goes on with what a monitor before has left there."""
        stem = f"{header.node}-{header.rank}"
        self._values = LineFile(folder / "timings" / f"{stem}.jsonl")
        self._path = folder / "timings" / f"{stem}.hist"
        self._state = Durations(header=header, began_at=at)
        self._sections: dict[str, _Section] = {}
        self._starts = 0
        self._lines = 0
        self._is_told = False
        self.dropped = 0
        self._go_on(folder / "timings" / f"{stem}.jsonl")

    @property
    def fingerprint(self) -> str:
        """Of the configuration, empty until it is known."""
        return self._state.header.fingerprint

    def know(self, fingerprint: str) -> None:
        """Note the configuration."""
        self._state.header = msgspec.structs.replace(self._state.header, fingerprint=fingerprint)

    def _go_on(self, values: Path) -> None:
        """Take over the files of the same run, if there are any and they can be read."""
        try:
            known = read_histograms(self._path)
        except (OSError, DecodeError):
            return
        if known.header.run != self._state.header.run:
            return
        self._state = known
        for name, periods in known.sections.items():
            total = Histogram()
            for period in periods.values():
                total.merge(period.histogram)
            self._sections[name] = _Section(total=total, i=total.count, threshold=threshold(total))
        try:
            size = values.stat().st_size
        except OSError:
            size = 0
        self._lines = size // 90  # about; it only bounds the file
        self._starts = 1
        self._is_told = size > 0

    def started(self, how: Start, at: float, cycle: int = 0, iteration: int = 0) -> None:
        """A worker, or an iteration of its function, began."""
        self._starts += 1
        for section in self._sections.values():
            section.j = 0
        self._write(Started(how, at, cycle, iteration))

    def add(self, name: str, seconds: float, at: float, end: End = "ok") -> None:
        """An occurrence ended, or was cut off. at: wall seconds of its beginning."""
        section = self._sections.setdefault(name, _Section(total=Histogram()))
        first = FIRST if self._starts <= 1 else FIRST_AGAIN
        is_told = section.j < first or end != "ok" or seconds > section.threshold > 0.0
        if is_told:
            section.kept += 1
            self._write(Value(name, section.i, section.j, round(at, 3), round(seconds, 9), end))
        section.i += 1
        section.j += 1
        if end == "ok":
            section.total.add(seconds)
            period = self._period(name, at)
            period.histogram.add(seconds)
            if seconds >= period.histogram.max:
                period.max_at = at
            if section.total.count % 256 == 0 or section.total.count & (section.total.count - 1) == 0:
                section.threshold = threshold(section.total)

    def median(self, name: str) -> float:
        """Return the middle of all that was added of a section, in seconds; 0 of nothing."""
        section = self._sections.get(name)
        if section is None:
            return 0.0
        above = section.total.count / 2
        for number in sorted(section.total.buckets, reverse=True):
            above -= section.total.buckets[number]
            if above < 0:
                return upper_bound(number)
        return 0.0

    def flush(self, at: float) -> bool:
        """Write the histograms; answers whether it worked."""
        self._state.seconds = max(0.0, at - self._state.began_at)
        return files.replace(self._path, encoding.to_json(self._state))

    def close(self, at: float) -> None:
        self.flush(at)
        self._values.close()

    def _period(self, name: str, at: float) -> Period:
        state = self._state
        number = max(0, int((at - state.began_at) // state.period_s))
        while number >= PERIODS:
            self._double()
            number = int((at - state.began_at) // state.period_s)
        return state.sections.setdefault(name, {}).setdefault(number, Period(Histogram()))

    def _double(self) -> None:
        """Make periods twice as long, two of them one."""
        self._state.period_s *= 2
        for name, periods in self._state.sections.items():
            merged: dict[int, Period] = {}
            for number, period in periods.items():
                known = merged.setdefault(number // 2, Period(Histogram()))
                if period.histogram.max >= known.histogram.max:
                    known.max_at = period.max_at
                known.histogram.merge(period.histogram)
            self._state.sections[name] = merged

    def _write(self, line: Header | Started | Value) -> None:
        if not self._is_told:
            self._is_told = True
            self._write(self._state.header)
        if self._lines >= MOST_VALUES:
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


_line = encoding.reader(Header | Started | Value)
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


def read_histograms(path: Path) -> Durations:
    """Read a file of histograms. Raises: OSError, DecodeError."""
    return _histograms(path.read_bytes())
