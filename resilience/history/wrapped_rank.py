"""Where did the time of one rank in a wrapped function go?  Takes the rank's records in order, in one cycle.

`history.rank_time` defines each cause, and adds up the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from resilience.facts import events
from resilience.facts.records import Record

Cause = Literal["startup", "restart", "hang", "rework", "idle"]
CAUSES: tuple[Cause, ...] = ("startup", "restart", "hang", "rework", "idle")
_State = Literal["", "startup", "work", "restart", "idle"]


class RankSeconds(msgspec.Struct):
    """Time of ranks in nanoseconds. work: includes the time lost to hangs and to rework. unknown: of workers that have
    shown no progress, since their start; no part of the total. vacant: the part of idle in which the rank's process had
    ended, or its call had failed."""

    work: int = 0
    startup: int = 0
    restart: int = 0
    hang: int = 0
    rework: int = 0
    idle: int = 0
    unknown: int = 0
    vacant: int = 0

    @property
    def total(self) -> int:
        return self.work + self.startup + self.restart + self.idle

    @property
    def productive(self) -> int:
        return max(0, self.work - self.hang - self.rework)

    def add(self, other: RankSeconds) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class WrappedRank:
    """One rank in its wrapped function, in one cycle. Takes the rank's records in order."""

    def __init__(self, node: str) -> None:
        self.node = node
        self._spent = RankSeconds()
        self._ended_ns: int | None = None  # when its process ended, or the others went on without it
        self._has_failed = False  # its call is over, and has not completed
        self.began_ns = 0  # its first call
        self._calls = 0
        self._rank: int | None = None
        self.first_step: int | None = None  # of its first call
        self.clock_ns = 0  # UTC minus monotonic time of its last record
        self.since = 0  # start of its present state
        self._state: _State = ""
        self._is_active = True
        self._begin_call()

    def _begin_call(self) -> None:
        """Forget the steps of an earlier call: another function may have other steps."""
        self._worked = 0  # nanoseconds of work before the last interruption
        self._is_explained = True  # whether a hang caused the last interruption is known
        self._reached: int | None = None  # the interrupted step
        self._has_stepped = False  # a step was interrupted
        self._entered: int | None = None  # the step with which it continued after a restart
        self._is_step_unknown = False  # no step has been reported since the last restart
        self._loading = 0  # nanoseconds of work before the first step of the call
        self._step_ns: float | None = None  # duration of one step
        self._repeated = 0  # steps of rework that do not count yet: how long a step takes is not known

    def take(self, record: Record) -> None:
        """Add a record of the rank or of its monitor."""
        self.clock_ns, self._rank = record.wall_ns - record.mono_ns, record.origin.initial_rank
        _TAKEN_BY[type(record.event)](self, record.event, record.mono_ns)

    def _stage_started(self, event: events.StageStarted, at: int) -> None:
        if event.stage == "restart":
            self._interrupted(at, None)
        elif event.stage == "run" and not self._is_active:
            self._go("idle", at)
        elif event.stage == "run" and self._state != "restart":
            self._go("work", at)

    def _stage_ended(self, event: events.StageEnded, at: int) -> None:
        if event.outcome == "completed" and event.stage == "run":
            self._worked = max(0, at - self.since) if self._state == "work" else self._worked
            self._go("idle", at)
        elif event.outcome == "completed" and event.stage == "restart":
            self._go("work" if self._is_active else "idle", at)

    def _restart_ended(self, event: events.RestartEnded, at: int) -> None:
        if event.step is None:
            self._is_step_unknown = True
        else:
            self._went_on(event.step)

    def _first_step_reported(self, event: events.FirstStepReported, at: int) -> None:
        if self._entered is None:  # two threads may report it
            self._entered, self._loading = event.step, round(max(0.0, event.after_s) * 1e9)
            self._began_with(event.step)

    def _first_step_taken(self, event: events.RestartStep, at: int) -> None:
        self._went_on(event.step)

    def _outcome_seen(self, event: events.IterationDecided, at: int) -> None:
        self._forget_unknown()
        self._came_to(event.step)
        self._interrupted(at, event.silent_for_s)

    def _fell_silent(self, event: events.RankFellSilent, at: int) -> None:
        self._interrupted(at, event.silent_for_s)

    def _was_interrupted(self, event: events.RankInterrupted, at: int) -> None:
        if event.record.rank == self._rank and event.record.step is not None:
            self._forget_unknown()
            self._came_to(event.record.step)

    def _iteration_started(self, event: events.IterationStarted, at: int) -> None:
        self._is_active, self._is_explained = event.state == "active", True

    def _call_started(self, event: events.CallStarted, at: int) -> None:
        self.began_ns, self._has_failed, self._calls = self.began_ns or at, False, self._calls + 1
        self._begin_call()
        self._go("startup", at)

    def _call_ended(self, event: events.CallEnded, at: int) -> None:
        self._has_failed = event.outcome != "completed"
        self._go("idle" if self._has_failed else "", at)

    def _exited(self, event: events.RankExited, at: int) -> None:
        self._ended_ns = at

    def excluded(self, by: Record, offsets: Mapping[str, int]) -> None:
        """Note that the others went on without this rank. It may have died together with its monitor."""
        if self._ended_ns is None and self._state:
            here, there = by.origin.node, self.node
            wall_ns = by.wall_ns - offsets.get(here, 0) + offsets.get(there, 0)
            self._ended_ns = by.mono_ns if here == there else wall_ns - self.clock_ns

    def spent_until(self, until: int | None) -> RankSeconds:
        """Return the rank's time by cause. until: monotonic nanoseconds; None: only intervals that have ended."""
        spent = msgspec.structs.replace(self._spent)
        ends = [at for at in (until, self._ended_ns) if at is not None]
        if self._state and ends:
            setattr(spent, self._state, getattr(spent, self._state) + max(0, min(ends) - self.since))
            if until is not None and self._ended_ns is not None:
                spent.vacant = max(0, until - max(self._ended_ns, self.since))  # the place of a dead rank is empty
                spent.idle += spent.vacant
            if until is not None and self._has_failed:
                spent.vacant = max(0, until - self.since)
        return spent

    def counted_until(self, until: int) -> int:
        """Return where `spent_until` ends the count of this rank before its place is vacant, in UTC nanoseconds of its
        node."""
        return self.clock_ns + (until if self._ended_ns is None else min(until, self._ended_ns))

    def silent_until(self, at: int, silent_ns: int) -> int:
        """Return for how many of the last silent_ns nanoseconds before `at`, when the launcher ended the cycle, a rank
        had been at work. 0 if its Wrapper had an interruption of its own, which says itself how long a rank was silent.
        A rank whose process had ended is idle."""
        gone = 0 if self._ended_ns is None else max(0, at - self._ended_ns)
        is_later = self._state == "restart" and self.since > at and not self._is_explained
        worked = at - self.since if self._state == "work" else self._worked - (self.since - at) if is_later else 0
        return max(0, min(silent_ns, worked) - gone)

    def repeated_from(self, resumed: int | None, end: int, silent_ns: int) -> int:
        """Return how many nanoseconds of work are done again in the next cycle of the launcher, 0 if that is not known.
        resumed: the step with which that cycle began. end: of this cycle. silent_ns: its silence, if the launcher found
        a hang."""
        reached = self._reached
        if resumed is None or reached is None or self._calls > 1:
            return 0
        silence, worked = self.silent_until(end, silent_ns), self._worked
        if not self._is_step_unknown:  # else no step has begun since the restart
            at = end if self._ended_ns is None else min(end, self._ended_ns)
            worked = (max(0, at - self.since) if self._state == "work" else worked) - silence
        step_ns = self._duration_of_step(worked, reached, resumed)
        if step_ns is None:
            return 0
        steps = self._repeated + max(0, reached - resumed)
        return min(max(0, self.spent_until(end).productive - silence), round(steps * step_ns))

    def _go(self, state: _State, at: int) -> None:
        if self._state:
            setattr(self._spent, self._state, getattr(self._spent, self._state) + max(0, at - self.since))
        self._state = state
        if at > self.since:
            self.since = at

    def _interrupted(self, at: int, silent_for_s: float | None) -> None:
        if self._state == "work":
            self._forget_unknown()
            self._worked = max(0, at - self.since)
            self._is_explained = False
            self._go("restart", at)
        if self._state == "restart" and silent_for_s is not None and not self._is_explained:
            silence = min(self._worked, round(max(0.0, silent_for_s) * 1e9))
            self._spent.hang += silence
            self._worked -= silence
            self._is_explained = True

    def _came_to(self, step: int | None) -> None:
        if step is not None:
            self._reached, self._has_stepped = step, True

    def _forget_unknown(self) -> None:
        """Forget the steps before a restart if no step was reported after it: its rework stays unknown."""
        if self._is_step_unknown:
            if self._reached is not None:
                self._step_ns = self._duration_of_step(self._worked, self._reached, None)
            self._is_step_unknown, self._entered, self._reached, self._loading = False, None, None, 0

    def _went_on(self, step: int) -> None:
        """Count the rework of a rank that continues with `step`: it repeats its work beyond that step."""
        self._is_step_unknown = False
        if not self._has_stepped:  # else it began with an earlier step, which is not on record
            self._began_with(step)
        if self._reached is not None:
            self._step_ns = self._duration_of_step(self._worked, self._reached, step)
            self._repeated += max(0, self._reached - step)
            if self._step_ns is not None:
                self._spent.rework += min(self._spent.productive, round(self._repeated * self._step_ns))
                self._repeated = 0
        self._entered, self._reached, self._loading = step, None, 0

    def _began_with(self, step: int) -> None:
        if self.first_step is None and self._calls <= 1:
            self.first_step = step

    def _duration_of_step(self, worked: int, reached: int, resumed: int | None) -> float | None:
        """Return the duration of one step before a restart, in nanoseconds. A job that goes on with step 0 began with
        it."""
        entered = 0 if self._entered is None and resumed == 0 else self._entered
        if entered is not None and reached > entered and worked > self._loading:
            return (worked - self._loading) / (reached - entered)
        return self._step_ns


_TAKEN_BY: dict[type[events.Event], Callable[[WrappedRank, Any, int], None]] = {
    events.StageStarted: WrappedRank._stage_started,
    events.StageEnded: WrappedRank._stage_ended,
    events.RestartEnded: WrappedRank._restart_ended,
    events.FirstStepReported: WrappedRank._first_step_reported,
    events.RestartStep: WrappedRank._first_step_taken,
    events.IterationDecided: WrappedRank._outcome_seen,
    events.RankInterrupted: WrappedRank._was_interrupted,
    events.RankFellSilent: WrappedRank._fell_silent,
    events.IterationStarted: WrappedRank._iteration_started,
    events.CallStarted: WrappedRank._call_started,
    events.CallEnded: WrappedRank._call_ended,
    events.RankExited: WrappedRank._exited,
}
OF_TIMES = frozenset(_TAKEN_BY)
"""Events that move a wrapped rank from one cause to another."""
