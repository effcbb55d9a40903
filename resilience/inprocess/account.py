"""What happened to this rank, told as it happens.

The call says when it passes from one phase to the next; the account turns that into events with
durations. Phases follow one another without a gap, so their durations add up to the restart's. A
restart ends with the first sign of progress after the function was entered again; where the function
shows none, with its entry, and the event says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import msgspec

from resilience.core.attribution import FaultOrigin, InterruptionRecord
from resilience.core.events import (
    Event,
    Interrupted,
    IterationEnded,
    IterationStarted,
    Outcome,
    RestartEnded,
    StageEnded,
    StageName,
    StageStarted,
)

if TYPE_CHECKING:
    from resilience.inprocess.state import State
    from resilience.telemetry.emitter import Emitter

Sign = Literal["heartbeat", "step", "ping", "section", "entry"]


class OpenStage:
    """A hook that runs. outcome: how it ended."""

    outcome: Outcome = "failed"


class Account:
    """One rank's account of one call. Used by the main thread only."""

    def __init__(self, emitter: Emitter, step: Callable[[], int | None]) -> None:
        self._step = step  # the highest step of this iteration
        self._emitter = emitter
        self._phase: StageName | None = None
        self._phase_began = 0.0
        self._restart_began: float | None = None
        self._entered_at: float | None = None
        self._is_awaiting_progress = False
        self._iteration_began = 0.0
        self._interruption = "peer"
        self._unsettled: InterruptionRecord | None = None  # a failure that has no record yet

    @property
    def is_restarting(self) -> bool:
        """Whether a restart has begun that has not shown its first progress yet."""
        return self._restart_began is not None

    def _emit(self, *events: Event) -> None:
        self._emitter.emit(*events)

    def iteration_started(self, state: State) -> None:
        self._iteration_began = time.monotonic()
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
        self._is_awaiting_progress = self.is_restarting
        self._emit(StageStarted("run"))

    def progressed(self, sign: Sign) -> None:
        """The function showed its first progress: a restart is over."""
        if not self._is_awaiting_progress or self._restart_began is None or self._entered_at is None:
            return
        self._is_awaiting_progress = False
        ended_at = self._entered_at if sign == "entry" else time.monotonic()
        self._end_phase(ended_at, "completed")
        duration = ended_at - self._restart_began
        ended = StageEnded("restart", "completed", duration, ended_ago_s=time.monotonic() - ended_at)
        self._emit(ended, RestartEnded(self._interruption, duration, sign, self._step()))
        self._restart_began = None
        self._interruption = "peer"

    def left_function(self, is_interrupted: bool, failed: bool) -> None:
        now = time.monotonic()
        self.progressed("entry")
        outcome: Outcome = "interrupted" if is_interrupted and not failed else "failed" if failed else "completed"
        assert self._entered_at is not None
        self._emit(StageEnded("run", outcome, now - self._entered_at))
        self._entered_at = None

    def failed(self, record: InterruptionRecord) -> None:
        """This rank failed: its restart begins here. Whose fault it is may have to be settled first."""
        self.progressed("entry")  # of the restart before, had it shown none
        self.settled("communication")  # a failure before this one, if nothing settled it
        if record.origin == "consequence":
            self._emit(Interrupted(record))
            return
        self._begin_restart(record.interruption.value, time.monotonic())
        if record.origin == "communication":
            self._unsettled = record
        else:
            self._emit(Interrupted(record))

    def settled(self, origin: FaultOrigin) -> None:
        """It is known now whose fault the failure of this rank is."""
        if self._unsettled is not None:
            self._emit(Interrupted(msgspec.structs.replace(self._unsettled, origin=origin)))
            self._unsettled = None
            if origin == "consequence":
                self._interruption = "peer"

    def interrupted(self, at: float) -> None:
        """This rank learned at `at` (monotonic seconds) that its iteration is interrupted."""
        self._begin_restart("peer", at)
        self.phase("abort", at)

    def _begin_restart(self, interruption: str, at: float) -> None:
        if self._restart_began is None:
            self._restart_began = at
            self._interruption = interruption
            self._emit(StageStarted("restart"))
            self.phase("detect", at)

    def phase(self, name: StageName, at: float | None = None) -> None:
        """Pass to the next phase of the restart, now or at `at` (monotonic seconds)."""
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
        """This rank's iteration is over; `left` closes what is open for good."""
        now = time.monotonic()
        self.settled("communication")  # if the call ends before it is known whose fault it was
        if outcome == "left" and self._restart_began is not None:
            self._end_phase(now, "left")
            self._emit(StageEnded("restart", "left", now - self._restart_began))
            self._restart_began = None
        self._emit(IterationEnded(outcome, now - self._iteration_began))
