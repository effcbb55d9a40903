"""Keeps what a rank's sections and heartbeats took, so that limits can be learned from it.

Fed by the monitor with what the page's ring holds. Time out of sections is found here: what lies between
two sections while none is open. An occurrence that does not end by itself is kept as what it was: cut off
by an exception or a death, or killed by a limit of ours."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from resilience.core import encoding
from resilience.core.identity import Origin
from resilience.core.timeouts import HEARTBEAT, OUT_OF_SECTION, Seen, fallback, staleness
from resilience.core.watch import Learned
from resilience.errors import DecodeError
from resilience.monitor.page import Closed, OpenEntry
from resilience.telemetry.durations import Header, Recorder, Start

HOUR = 3600.0


class _Seen(msgspec.Struct):
    """What was seen of a deadline that has a learned limit."""

    n: int = 0
    max_s: float = 0.0
    hour_began: float = 0.0
    hour_n: int = 0
    above_p99: int = 0
    is_stale: bool = False


class _Job(msgspec.Struct):
    """What is read of job.json."""

    fingerprint: str = ""


class Keeper:
    """One rank's timings. The recorder's files are made with the first thing to keep."""

    def __init__(self, folder: Path, origin: Origin) -> None:
        self._folder = folder
        self._origin = origin
        self._recorder: Recorder | None = None
        self._start: tuple[Start, int, int] | None = None
        self._left_at: float | None = None  # when the last section was left, while none is open
        self._learned: Mapping[str, Learned] = {}
        self._seen: dict[str, _Seen] = {}
        self._gaps: list[tuple[float, float]] = []  # begin, seconds: out of sections, unless one was open around them

    def expect(self, learned: Mapping[str, Learned]) -> None:
        """Compare what comes with what limits were learned from."""
        self._learned = learned

    def stale(self) -> list[tuple[str, str, float]]:
        """Return (deadline, why, fallback in seconds) of limits that are not to be believed any more; each once."""
        found = []
        for name, seen in self._seen.items():
            known = self._learned.get(name)
            if known is None or seen.is_stale or self._recorder is None:
                continue
            now = Seen(seen.n, seen.max_s, self._recorder.median(name), seen.above_p99, seen.hour_n)
            why = staleness(known, now)
            if why:
                seen.is_stale = True
                found.append((name, why, fallback(known, now)))
        return found

    def started(self, how: Start, cycle: int, iteration: int) -> None:
        """The rank's program, or its wrapped function, begins."""
        self._start = (how, cycle, iteration)
        self._left_at = None
        self._gaps.clear()

    def take(self, closed: Iterable[Closed], still_open: Iterable[OpenEntry]) -> None:
        """Keep what has ended since the last call. Times are monotonic seconds."""
        offset = time.time() - time.monotonic()
        for entry in closed:
            if not entry.name:
                self._add(HEARTBEAT, entry.duration, entry.at - entry.duration + offset)
                continue
            self._add(entry.name, entry.duration, entry.at + offset, is_cut=entry.failed)
            self._section(entry.at, entry.at + entry.duration)
        first_open = min((entry.entered_at for entry in still_open), default=float("inf"))
        for begin, seconds in self._gaps:
            if begin < first_open:  # else it lies within a section that is open still
                self._add(OUT_OF_SECTION, seconds, begin + offset)
        self._gaps = [(begin, seconds) for begin, seconds in self._gaps if begin >= first_open]

    def _section(self, entered: float, left: float) -> None:
        """A section ended: gaps within it were none; the time before it may be one."""
        while self._gaps and self._gaps[-1][0] >= entered:  # they are in the order of their begins
            self._gaps.pop()
        if self._left_at is not None and entered > self._left_at:
            self._gaps.append((self._left_at, entered - self._left_at))
        self._left_at = left if self._left_at is None else max(self._left_at, left)

    def cut(self, still_open: Iterable[OpenEntry], killed: str) -> None:
        """The rank is gone: keep what it left open. killed: the section whose limit ended it, if one did."""
        now, offset = time.monotonic(), time.time() - time.monotonic()
        for entry in still_open:
            end = "killed" if entry.name == killed else "cut"
            self._record().add(entry.name, now - entry.entered_at, entry.entered_at + offset, end)  # type: ignore[arg-type]

    def flush(self) -> None:
        """Write the histograms. What cannot be written is lost, and nobody notices."""
        if self._recorder is None:
            return
        if not self._recorder.fingerprint:
            self._recorder.know(self._fingerprint())
        self._recorder.flush(time.time())

    def close(self) -> None:
        self.flush()
        if self._recorder is not None:
            self._recorder.close(time.time())
            self._recorder = None

    def _add(self, name: str, seconds: float, at: float, is_cut: bool = False) -> None:
        self._record().add(name, seconds, at, "cut" if is_cut else "ok")
        known = self._learned.get(name)
        if known is not None and not is_cut:
            seen = self._seen.setdefault(name, _Seen(hour_began=at))
            if at - seen.hour_began >= HOUR:
                seen.hour_began, seen.hour_n, seen.above_p99 = at, 0, 0
            seen.n += 1
            seen.hour_n += 1
            seen.above_p99 += seconds > known.p99_s
            seen.max_s = max(seen.max_s, seconds)

    def _record(self) -> Recorder:
        if self._recorder is None:
            origin = self._origin
            header = Header(
                run=self._folder.name,
                node=origin.node,
                rank=-1 if origin.initial_rank is None else origin.initial_rank,
                world_size=origin.world_size or 1,
                fingerprint=self._fingerprint(),
            )
            self._recorder = Recorder(self._folder, header, time.time())
        if self._start is not None:
            how, cycle, iteration = self._start
            self._start = None
            self._recorder.started(how, time.time(), cycle, iteration)
        return self._recorder

    def _fingerprint(self) -> str:
        """The run's configuration, as job.json tells it; empty until that is written."""
        try:
            return str(encoding.from_json((self._folder / "job.json").read_bytes(), _Job).fingerprint)
        except (OSError, DecodeError):
            return ""
