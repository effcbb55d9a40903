"""What happened to this rank?  Reports it as events, as it happens.

The call reports each change of phase; this module turns that into events with durations. Phases follow one
another without a gap, so their durations add up to that of the restart. A restart ends with the first sign of
progress after the function was entered again. If this rank's function has shown none before, the restart ends with the
entry: it may never show any, and then nobody could tell when it is at work again. If it shows none this time only, the
event says so when the function is left, with the time of the entry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from resilience.facts.events import (
    Event,
    FirstStepReported,
    IterationEnded,
    IterationStarted,
    Outcome,
    ProgressSign,
    RankInterrupted,
    RestartEnded,
    RestartStep,
    StageEnded,
    StageName,
    StageStarted,
)
from resilience.facts.interruptions import FaultOrigin, InterruptionRecord

if TYPE_CHECKING:
    from resilience.inprocess.state import State
    from resilience.telemetry.emitter import Emitter


class OpenStage:
    """A running hook. outcome: how it ended."""

    outcome: Outcome = "failed"


class RankEvents:
    """The events of one rank in one call. Used by the main thread; `progressed` also by the thread of a sign."""

    def __init__(self, emitter: Emitter, step: Callable[[], int | None]) -> None:
        self._step = step  # the highest step of this iteration
        self._emitter = emitter
        self._phase: StageName | None = None
        self._phase_began = 0.0
        self._restart_began: float | None = None
        self._entered_at: float | None = None
        self._is_awaiting_progress = False
        self._has_shown_progress = False  # in this call
        self.is_without_progress = True  # in this iteration
        self._is_awaiting_step = False  # of the call, or of a restart that has ended with another signal
        self._has_restarted = False  # in this call
        self._iteration_began = 0.0
        self._interruption = "peer"
        self._unsettled_failure: InterruptionRecord | None = None  # a failure that has no record yet

    @property
    def is_restarting(self) -> bool:
        """Return True if a restart has begun and has not shown its first progress yet."""
        return self._restart_began is not None

    def _emit(self, *events: Event) -> None:
        self._emitter.emit(*events)

    def iteration_started(self, state: State) -> None:
        self._iteration_began = time.monotonic()
        self.is_without_progress = True
        active = state.rank < state.active_world_size
        self._emit(IterationStarted(state.active_world_size, "active" if active else "inactive"))
        if self._restart_began is not None:
            self.phase("resume")

    @contextmanager
    def stage(self, name: StageName) -> Iterator[OpenStage]:
        """Time a hook before the function; the body sets the outcome."""
        began = time.monotonic()
        stage = OpenStage()
        self._emit(StageStarted(name))
        try:
            yield stage
        finally:
            self._emit(StageEnded(name, stage.outcome, time.monotonic() - began))

    def entering(self) -> None:
        self._entered_at = time.monotonic()
        self._is_awaiting_step = not self.is_restarting
        self._emit(StageStarted("run"))
        if self._restart_began is not None and not self._has_shown_progress:
            self._end_restart("entry", self._restart_began, self._entered_at)
        self._is_awaiting_progress = self.is_restarting

    def progressed(self, sign: ProgressSign) -> bool:
        """Report the function's first progress, which ends a restart, and its first step. Return True as long as a step
        is still of interest. 0.2 µs for each further signal of a program that never reports a step."""
        self._has_shown_progress |= sign != "entry"
        self.is_without_progress = False
        if self._is_awaiting_progress and self._restart_began is not None and self._entered_at is not None:
            self._is_awaiting_progress = False
            self._end_restart(sign, self._restart_began, self._entered_at)
        elif sign == "step" and self._is_awaiting_step and (step := self._step()) is not None:
            self._is_awaiting_step = False
            entered_at = self._entered_at  # once: the main thread may be leaving the function
            if self._has_restarted:
                self._emit(RestartStep(step))
            elif entered_at is not None:
                self._emit(FirstStepReported(step, time.monotonic() - entered_at))
        return self._is_awaiting_step

    def _end_restart(self, sign: ProgressSign, restart_began: float, entered_at: float) -> None:
        ended_at = entered_at if sign == "entry" else time.monotonic()
        self._end_phase(ended_at, "completed")
        duration, step = ended_at - restart_began, self._step()
        ended = StageEnded("restart", "completed", duration, ended_ago_s=time.monotonic() - ended_at)
        self._emit(ended, RestartEnded(self._interruption, duration, sign, step))
        self._is_awaiting_step = step is None
        self._restart_began, self._has_restarted = None, True
        self._interruption = "peer"

    def left_function(self, is_interrupted: bool, failed: bool) -> None:
        now = time.monotonic()
        self.progressed("entry")
        outcome: Outcome = "interrupted" if is_interrupted and not failed else "failed" if failed else "completed"
        assert self._entered_at is not None
        self._emit(StageEnded("run", outcome, now - self._entered_at))
        self._entered_at, self._is_awaiting_step = None, False

    def failed(self, record: InterruptionRecord) -> None:
        """Report that this rank failed. Its restart begins here; whose fault it is may still be open."""
        self.progressed("entry")  # ends the previous restart, if it has shown none
        self.settled("communication")  # an earlier failure, if it is still unsettled
        if record.origin == "consequence":
            self._emit(RankInterrupted(record))
            return
        self._begin_restart(record.interruption.value, time.monotonic())
        if record.origin == "communication":
            self._unsettled_failure = record
        else:
            self._emit(RankInterrupted(record))

    def settled(self, origin: FaultOrigin) -> None:
        """Report whose fault the failure of this rank is."""
        if self._unsettled_failure is not None:
            self._emit(RankInterrupted(msgspec.structs.replace(self._unsettled_failure, origin=origin)))
            self._unsettled_failure = None
            if origin == "consequence":
                self._interruption = "peer"

    def interrupted(self, at: float) -> None:
        """Report that this rank learned of the interruption at `at` (monotonic seconds)."""
        self._begin_restart("peer", at)
        self.phase("abort", at)

    def _begin_restart(self, interruption: str, at: float) -> None:
        if self._restart_began is None:
            self._restart_began = at
            self._interruption = interruption
            self._emit(StageStarted("restart"))
            self.phase("detect", at)

    def phase(self, name: StageName, at: float | None = None) -> None:
        """Move to the next phase of the restart, now or at `at` (monotonic seconds)."""
        at = time.monotonic() if at is None else max(at, self._phase_began)
        self._end_phase(at, "completed")
        self._phase, self._phase_began = name, at
        self._emit(StageStarted(name))

    def _end_phase(self, at: float, outcome: Outcome) -> None:
        if self._phase is not None:
            duration = max(0.0, at - self._phase_began)
            self._emit(StageEnded(self._phase, outcome, duration, ended_ago_s=max(0.0, time.monotonic() - at)))
            self._phase = None

    def iteration_ended(self, outcome: Outcome) -> None:
        """Report the end of this rank's iteration; `left` also closes an open restart."""
        now = time.monotonic()
        self.settled("communication")  # the call may end before the fault is settled
        if outcome == "left" and self._restart_began is not None:
            self._end_phase(now, "left")
            self._emit(StageEnded("restart", "left", now - self._restart_began))
            self._restart_began = None
        self._emit(IterationEnded(outcome, now - self._iteration_began))
