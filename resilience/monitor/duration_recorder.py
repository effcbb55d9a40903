"""Records the durations of a rank's sections, steps and heartbeats, so that limits can be learned from them.

The monitor feeds it from the page's ring. `facts.deadlines` defines what each deadline measures. The number of
occurrences since the last start comes from here too: `core.watch` needs it for the limits of the first ones. An
occurrence that did not end by itself is recorded as such: cut off by an exception, a death or a suspension of the node,
or killed by one of our limits."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median_low

import msgspec

from resilience.calibration.limits_file import NEAR_MISS, SeenInJob, fallback, staleness
from resilience.calibration.recurring_phases import BEGINNING, SLOW
from resilience.core.observation import Doing
from resilience.core.standstills import Standstill, longest
from resilience.core.watch import Finding
from resilience.errors import DecodeError
from resilience.facts import deadlines
from resilience.facts.deadlines import HEARTBEAT, INITIAL_HEARTBEAT, OUT_OF_SECTION, STEP, Start
from resilience.facts.identity import Origin
from resilience.facts.limits import Learned
from resilience.facts.phases import Phases
from resilience.monitor.page import Closed, OpenEntry, PageView
from resilience.system.background import READ_LIMIT, WRITER
from resilience.telemetry.durations import End, Header, Recorder
from resilience.telemetry.recording import read_job

HOUR = 3600.0
LONG = 5.0  # seconds: a standstill that cuts off any occurrence; a shorter one only if it took most of its time
LATER = 1e-3  # seconds by which a sign has to be later than another one to count as a different sign

JUMP = 10  # a step that rises by more than this many times the usual rise was read from a checkpoint
_RISES = 99  # how many rises of the step are kept, the first ones after a start


class _Statistics(msgspec.Struct):
    """This job's statistics of a deadline that has a learned limit. fallback_s: the limit since that one was stale, 0
    before."""

    n: int = 0
    max_s: float = 0.0
    hour_began: float = 0.0
    hour_n: int = 0
    above_p99: int = 0
    fallback_s: float = 0.0
    outside_max_s: float = 0.0


class _Started(msgspec.Struct, frozen=True):
    """A start. at: monotonic seconds; nothing that began before belongs to it."""

    how: Start
    at: float
    cycle: int
    iteration: int


class _Rises(msgspec.Struct):
    """By how much the step rose in all. A program may report only every tenth step, and the last step of an epoch.

    The jump of a program that reports a step before it loads its checkpoint is no progress: a rise beyond JUMP times
    the median counts as the median. first: the first rises, which tell the median; later: the sum of all others."""

    first: list[int] = []
    later: int = 0

    def add(self, rise: int) -> None:
        if len(self.first) < _RISES:
            self.first.append(rise)
        else:
            self.later += self._usual(rise)

    @property
    def total(self) -> int:
        return sum(map(self._usual, self.first)) + self.later

    @property
    def median(self) -> int:
        """Return the usual rise, 0 before the first one."""
        return median_low(self.first) if self.first else 0

    def _usual(self, rise: int) -> int:
        median = self.median
        return median if rise > JUMP * median else rise


class Position(msgspec.Struct, frozen=True):
    """Where a recorder is, so that another monitor can continue. starting: a start without any sign of life yet.
    counts: occurrences since the last start. recorded: all occurrences so far that ended well."""

    how: Start
    starting: _Started | None
    counts: dict[str, int]
    left_at: float | None
    was_slow: dict[str, bool]
    first_step: int | None
    rises: _Rises
    silent_from: float
    has_beaten: bool
    recorded: int
    away_since: float | None = None


class DurationRecorder:
    """One rank's durations. Files are created with the first duration."""

    def __init__(self, folder: Path, origin: Origin) -> None:
        self._folder = folder
        header = Header(
            run=folder.name,
            node=origin.node,
            rank=-1 if origin.initial_rank is None else origin.initial_rank,
            world_size=origin.world_size or 1,
        )
        self._recorder = Recorder(folder, header, time.time())
        self._is_known = False  # whether the run's configuration is known
        self._cycle = origin.cycle
        self._starting: _Started | None = None  # a start without any sign of life yet
        self._counts: Counter[str] = Counter()  # occurrences since the last start
        self._left_at: float | None = None  # when the last section was left, while none is open
        self._away_since: float | None = None  # when the function ended, until it runs again
        self._learned: Mapping[str, Learned] = {}
        self._phases: Mapping[str, Phases] = {}
        self._was_slow: dict[str, bool] = {}  # at all expected positions so far, by deadline
        self._first_step: int | None = None  # since the last start; None: no step was reported
        self._rises = _Rises()  # of the step since the last start
        self._statistics: dict[str, _Statistics] = {}
        self.has_near_miss = False  # since the last call of `stale`: an occurrence may have come near its limit
        self._gaps: list[
            tuple[float, float, bool]
        ] = []  # begin, seconds, is_copy: out of sections, unless a section was open around them
        self._standstills: list[Standstill] = []
        self._silent_from = 0.0  # for the initial heartbeat
        self._has_beaten = False
        self.how: Start = "cold"

    def expect(self, learned: Mapping[str, Learned], phases: Mapping[str, Phases]) -> None:
        """Compare durations with those from which limits were learned. phases: positions known to be slow."""
        self._learned, self._phases = learned, phases

    @property
    def aligned(self) -> frozenset[str]:
        """Return the deadlines whose occurrences are known to be at the positions of the observed runs.

        They were slow at every position where that was expected, at least one so far. That is no proof: checkpoints
        lie between two evaluations, so a job that continues from one may evaluate at the same positions, but save at
        others. So if the job reports its steps, the first one must be that of a job that did not continue from a
        checkpoint. If no position is slow, only these numbers show it."""
        return frozenset(name for name, phases in self._phases.items() if self._is_aligned(name, phases))

    def _is_aligned(self, name: str, phases: Phases) -> bool:
        if not self._was_slow.get(name, not phases.positions):
            return False
        first = self._first_step
        if phases.positions:  # a program that reports every tenth step begins with the tenth
            return first is None or first <= max(BEGINNING, self._rises.median)
        return first is not None and first <= BEGINNING

    def stale(self) -> list[tuple[str, str, float]]:
        """Return (deadline, reason, fallback in seconds) of limits that no longer fit. A fallback is compared only with
        the longest occurrence, until that comes near it."""
        stale_limits = []
        self.has_near_miss = False
        for name, statistics in self._statistics.items():
            learned = self._learned.get(name)
            if learned is None:
                continue
            if statistics.fallback_s:
                learned = Learned(statistics.fallback_s, median_s=0.0, p99_s=0.0)
            in_job = SeenInJob(
                statistics.n,
                statistics.max_s,
                self._recorder.median(name),
                statistics.above_p99,
                statistics.hour_n,
                statistics.outside_max_s,
            )
            reason = staleness(learned, in_job)
            if reason:
                statistics.fallback_s = fallback(learned, in_job)
                stale_limits.append((name, reason, statistics.fallback_s))
        return stale_limits

    def process_started(self, cycle: int, is_cold: bool | None = None) -> None:
        """Note the start of the rank's program. is_cold: by default True if this run has no record of it."""
        is_cold = self._recorder.is_new if is_cold is None else is_cold
        self._cycle = cycle
        self._start("cold" if is_cold else "warm", 0.0, 0)

    @property
    def position(self) -> Position:
        """Return what another recorder of this rank needs to continue."""
        return Position(
            self.how,
            self._starting,
            dict(self._counts),
            self._left_at,
            self._was_slow,
            self._first_step,
            self._rises,
            self._silent_from,
            self._has_beaten,
            self._recorder.recorded,
            self._away_since,
        )

    def continue_from(self, position: Position) -> int:
        """Continue where the recorder of a lost monitor stopped: no new start, no occurrence twice. Return how many
        occurrences it had not written."""
        self.how, self._starting, self._left_at = position.how, position.starting, position.left_at
        self._counts, self._was_slow = Counter(position.counts), dict(position.was_slow)
        self._first_step, self._rises = position.first_step, position.rises
        self._silent_from, self._has_beaten = position.silent_from, position.has_beaten
        self._away_since = position.away_since
        return self._recorder.continue_count(position.counts, position.recorded)

    def _iteration_began(self, at: float, iteration: int) -> None:
        """Note that the rank's signs of life begin anew. No gap reaches across this moment. Gaps noted before it are
        dropped, because they may lie within sections that were left open. at: monotonic seconds."""
        self._drop_gaps()
        if iteration > 0:  # the first one is part of the program's start; a program without a Wrapper has none
            self._start("iteration", at, iteration)

    def _start(self, how: Start, at: float, iteration: int) -> None:
        self.how = how
        self._starting = _Started(how, at, self._cycle, iteration)
        self._has_beaten = False
        self._silent_from = 0.0

    def occurrences(self, deadline: str) -> int:
        """Return how many occurrences have ended since the last start."""
        return 0 if self._starting is not None else self._counts[deadline]

    def stood_still(self, since: float, until: float) -> None:
        """Note that the monitor did not run, because it or its whole node was stopped. Monotonic seconds."""
        self._standstills = longest([*self._standstills, Standstill(since, until)])

    def take(
        self,
        closed: Iterable[Closed],
        still_open: Iterable[OpenEntry],
        announced: float | None = None,
        heartbeat_at: float | None = None,
        step: int | None = None,
        away_since: float | None = None,
    ) -> None:
        """Record what has ended since the last call. Times are monotonic seconds.

        announced: when heartbeats were announced. heartbeat_at, step: the last heartbeat, and the number of the last
        step, before `closed` was read. away_since: when the function ended, until it runs again, as `still_open` was
        read."""
        closed, still_open = list(closed), list(still_open)
        for entry in closed:
            if entry.begins is not None:
                self._iteration_began(entry.at, entry.begins)
                continue
            if entry.away == "begins":
                self._away_since = entry.at
                continue
            if entry.away == "interrupted":
                self._drop_gaps()
                continue
            if entry.away:
                self._returned(entry)
                continue
            began = entry.at if entry.name else entry.at - entry.duration
            self._note_start(began)
            if entry.is_step:
                if entry.duration > 0.0:  # the first one only starts the clock
                    self._rises.add(entry.rise)
                    self._add(STEP, entry.duration, began)
            elif not entry.name:
                self._add(HEARTBEAT, entry.duration, began, is_copy=entry.is_copy)
            else:
                self._add(deadlines.of_section(entry.name), entry.duration, began, entry.failed, entry.is_copy)
                self._section_ended(began, began + entry.duration, entry.is_copy)
        # Else `still_open` has later times than the gaps: they wait until the next call.
        if away_since == self._away_since:
            self._record_gaps(min((entry.entered_at for entry in still_open), default=float("inf")))
        self._away_since = away_since
        if announced is not None and not self._has_beaten:
            self._take_initial(closed, still_open, announced, heartbeat_at)
        if step is not None and self._starting is None:  # later steps count from the first one
            self._first_step = max(step - self._rises.total, self._first_step or 0)
            if self.how == "cold":
                self._recorder.state.first_step = self._first_step

    def _returned(self, entry: Closed) -> None:
        """Let what lasts now count as if the rank's wait had not passed."""

        def later(at: float) -> float:
            return min(at + entry.duration, entry.at)

        self._away_since = None
        self._left_at = None if self._left_at is None else later(self._left_at)
        self._silent_from = later(self._silent_from)
        self._gaps = [(later(begin), seconds, is_copy) for begin, seconds, is_copy in self._gaps]

    def entries_lost(self) -> None:
        """Note that occurrences were lost: until the next start, no position is known any more."""
        self._was_slow = dict.fromkeys(self._phases, False)
        self._drop_gaps()

    def _drop_gaps(self) -> None:
        """Forget the gaps that were noted: they may lie within sections that are still open, or were."""
        self._gaps.clear()
        self._left_at = None

    def _record_gaps(self, first_open: float) -> None:
        """Record the gaps before the first section that is still open, up to its opening. The others lie within it."""
        for begin, seconds, is_copy in self._gaps:
            if begin < first_open:
                self._add(OUT_OF_SECTION, min(seconds, first_open - begin), begin, is_copy=is_copy)
        self._gaps = [gap for gap in self._gaps if gap[0] >= first_open]

    def _take_initial(
        self, closed: list[Closed], still_open: list[OpenEntry], announced: float, heartbeat_at: float | None
    ) -> None:
        """Record the time from the announcement to the first heartbeat after it, once there is one."""
        gaps = [entry for entry in closed if not (entry.name or entry.is_step or entry.away) and entry.begins is None]
        beats = [at for entry in gaps for at in (entry.at - entry.duration, entry.at)]
        beats += [] if heartbeat_at is None else [heartbeat_at]
        first = min((at for at in beats if at >= announced), default=None)
        sections = [entry for entry in closed if entry.name]
        signs = [self._silent_from, announced, *(entry.entered_at for entry in still_open)]
        signs += [at for entry in sections for at in (entry.at, entry.at + entry.duration)]
        if first is None:
            self._silent_from = max(signs)
            return
        self._has_beaten = True
        since = max(at for at in signs if at <= first)
        self._note_start(since)
        self._add(INITIAL_HEARTBEAT, first - since, since)

    def _note_start(self, began: float) -> None:
        """Record the pending start, because an occurrence began at this time after it."""
        if self._starting is not None and began >= self._starting.at:
            start, self._starting = self._starting, None
            self._counts.clear()
            self._was_slow.clear()
            self._first_step, self._rises = None, _Rises()
            self._gaps.clear()
            self._left_at = None
            self._read_configuration()
            self._recorder.started(start.how, time.time(), start.cycle, start.iteration)

    def _section_ended(self, entered: float, left: float, is_copy: bool) -> None:
        """Note the end of a section. Gaps within it do not count; the time before it may be a gap, of which another
        monitor has a copy if it has one of the section."""
        while self._gaps and self._gaps[-1][0] >= entered:  # sorted by begin
            self._gaps.pop()
        if self._gaps:
            begin, seconds, _ = self._gaps[-1]
            if entered - begin < seconds:
                self._gaps[-1] = begin, entered - begin, is_copy
        if self._left_at is not None and entered > self._left_at:
            away = self._away_since
            until = entered if away is None or self._left_at >= away else min(entered, away)
            self._gaps.append((self._left_at, until - self._left_at, is_copy))
        self._left_at = left if self._left_at is None else max(self._left_at, left)

    def ended_well(self, view: PageView) -> None:
        """Record the last durations of a program or function that ended well: its end counts as the next sign."""
        if view.doing not in (Doing.ENDING, Doing.OUTSIDE):
            return
        ended_at = view.since if view.away_since is None else view.away_since
        for name, at in (
            (STEP, view.step_at),
            (HEARTBEAT, view.heartbeat_at),
            (OUT_OF_SECTION, None if view.open_sections else view.section_left_at),
        ):
            if at is not None and ended_at > at:
                self._note_start(at)
                self._add(name, ended_at - at, at)

    def cut(self, view: PageView, finding: Finding | None, found_at: float) -> None:
        """Record what a dead rank left open. finding: the limit that ended it, if one did, at `found_at`. An occurrence
        that continued after that time was healthy, and was recorded when it ended."""
        now = time.monotonic()
        limit = "" if finding is None else finding.limit
        silent_for = 0.0 if finding is None else finding.silent_for
        target = deadlines.parse_limit(limit)
        kind, section = target.kind, target.section
        killed = deadlines.of_section(section) if section else deadlines.deadline_of_limit(limit)
        since = found_at - silent_for
        # A silence may begin long after its section was entered.
        entered_by = found_at if kind == "silence" else since + LATER
        for entry in view.open_sections:
            self._note_start(entry.entered_at)
            name = deadlines.of_section(entry.name)
            is_killed = name == killed and entry.entered_at <= entered_by
            until = view.ended(entry.entered_at, now)
            if is_killed:
                until = found_at if kind == "silence" else entry.entered_at + silent_for
            if is_killed or not entry.is_copy:
                self._record(name, until - entry.entered_at, entry.entered_at, is_killed)
        signs = {
            STEP: view.step_at,
            HEARTBEAT: view.heartbeat_at,
            INITIAL_HEARTBEAT: view.heartbeat_at,
            OUT_OF_SECTION: view.section_left_at,
        }
        if killed in signs and (signs[killed] is None or signs[killed] <= since + LATER):  # type: ignore[operator]
            self._note_start(since)
            self._record(killed, silent_for, since, is_killed=True)

    def flush(self) -> None:
        """Write the histograms. Data that cannot be written are lost without notice."""
        self._read_configuration()
        self._recorder.flush(time.time())

    def take_unreadable(self) -> str:
        """Return the name of the file that keeps earlier histograms that cannot be decoded, once; empty if none."""
        return self._recorder.take_unreadable()

    def close(self) -> None:
        """Write everything. A disk that is slow now is waited for: what is not written here is lost."""
        WRITER.flush()  # else nothing is read or written while it is slow
        self._read_configuration()
        self._recorder.close(time.time())

    def _add(self, name: str, seconds: float, began: float, is_failed: bool = False, is_copy: bool = False) -> None:
        """Count an occurrence, and record it. is_copy: another monitor of the rank records it."""
        self._counts[name] += 1
        wall_time = began + time.time() - time.monotonic()
        lasted, seconds = seconds, self._before_standstill(began, seconds)
        is_whole = seconds == lasted and not is_failed
        if not is_copy:
            self._recorder.add(name, seconds, wall_time, "ok" if is_whole else "cut", is_failed)
        learned = self._learned.get(name)
        phases = self._phases.get(name)
        if learned is not None and phases is not None and phases.is_expected(self._counts[name] - 1):
            is_slow = seconds >= SLOW * learned.median_s
            self._was_slow[name] = is_slow and self._was_slow.get(name, True)
        if learned is not None and is_whole and not is_copy and self._counts[name] > learned.first:
            statistics = self._statistics.setdefault(name, _Statistics(hour_began=wall_time))
            if wall_time - statistics.hour_began >= HOUR:
                statistics.hour_began, statistics.hour_n, statistics.above_p99 = wall_time, 0, 0
            statistics.n += 1
            statistics.hour_n += 1
            statistics.above_p99 += seconds > learned.p99_s
            statistics.max_s = max(statistics.max_s, seconds)
            shortest = statistics.fallback_s or min(learned.timeout_s, learned.outside_s or learned.timeout_s)
            self.has_near_miss |= seconds > NEAR_MISS * shortest
            is_outside = phases is not None and phases.is_outside(self._counts[name] - 1)
            if phases is not None and is_outside and self.how == "cold" and self._is_aligned(name, phases):
                statistics.outside_max_s = max(statistics.outside_max_s, seconds)

    def _before_standstill(self, began: float, seconds: float) -> float:
        """Return the seconds of an occurrence until the rank stood still with its node; all if it did not.

        The rank went on if only its monitor was stopped: then no occurrence lasts for most of that time."""
        for standstill in self._standstills:
            within = min(began + seconds, standstill.ended) - max(began, standstill.began)
            if 2.0 * within > standstill.ended - standstill.began and (within > LONG or 2.0 * within > seconds):
                return max(0.0, standstill.began - began)
        return seconds

    def _record(self, name: str, seconds: float, began: float, is_killed: bool) -> None:
        end: End = "killed" if is_killed else "cut"
        if not is_killed:
            seconds = self._before_standstill(began, seconds)
        self._recorder.add(name, max(0.0, seconds), began + time.time() - time.monotonic(), end)

    def _read_configuration(self) -> None:
        """Read the run's configuration from job.json, unless it is known."""
        if self._is_known:
            return
        try:
            job = WRITER.ask(functools.partial(read_job, self._folder), READ_LIMIT)
        except (OSError, DecodeError):
            return
        self._is_known = True
        self._recorder.know(job.configuration, job.launch)
