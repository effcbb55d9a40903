"""What does a virtual rank do in a stage of the protocol?

The function takes a while and returns, raises, hangs or is interrupted; hooks take a moment, fail or get stuck. The
schedule and its seed decide."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from resilience.core.observation import Doing
from resilience.core.restart import COMPLETED, End, Result, Stage
from tests.restart_simulation.actors import Rank
from tests.restart_simulation.faults import Fail, Stall

if TYPE_CHECKING:
    from tests.restart_simulation.cluster import Cluster

Seconds = float

DOING = {Stage.FUNCTION: Doing.FUNCTION, Stage.RESERVE: Doing.WAITING}
BEFORE_THE_FUNCTION = (Stage.INITIALIZE, Stage.CHECK_BEFORE)
AFTER_A_FAULT = (Stage.FINALIZE, Stage.CHECK_AFTER, Stage.COLLECT)
KILLED_AFTER = 96.0  # seconds until a stuck rank is dead: the hard limit, grace, and a moment


class VirtualRank:
    """Runs the stages of one cluster's ranks."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._clock = cluster.clock
        self._rng = cluster.rng
        self._data = cluster.store.data

    def enter(self, rank: Rank, stage: Stage) -> None:
        """Enter a stage with a rank; `Cluster.step` gets the result when the rank leaves it."""
        now = self._clock.now
        self._cluster.referee.begins(rank.truth, stage, now - rank.called_at)
        fault = rank.faults.pop((rank.seat.iteration, stage), None) if rank.faults else None
        rank.does(DOING.get(stage, Doing.HOOK), now, "" if stage in DOING else stage.value)
        if stage is Stage.FUNCTION:
            self._run_function(rank, fault)
        elif stage is Stage.RESERVE:
            self._when_decided(rank, partial(self._reserve_is_over, rank, rank.token))
        elif isinstance(fault, Stall) and fault.how == "stuck":
            self._get_stuck(rank)
        elif stage is Stage.ABORT:
            self._when_decided(rank, partial(self._abort_is_over, rank, rank.token, self._stage_duration(rank, fault)))
        elif stage in BEFORE_THE_FUNCTION and self._is_interrupted(rank) and self._rng.random() < 0.5:
            self._leave_after(0.0, rank, stage, Result(End.INTERRUPTED))  # it noticed before the hook began
        else:
            self._leave_after(self._stage_duration(rank, fault), rank, stage, self._result(rank, stage, fault))
            if stage in BEFORE_THE_FUNCTION and isinstance(fault, Stall):
                self._when_decided(rank, partial(self._interrupt_hook, rank, rank.token, stage))

    # -- hooks ------------------------------------------------------------------------------------

    def _stage_duration(self, rank: Rank, fault: Fail | Stall | None) -> Seconds:
        duration = self._cluster.delay()
        if isinstance(fault, Stall):
            self._cluster.stalls(rank, fault.duration)
            duration += fault.duration
        return duration

    def _interrupt_hook(self, rank: Rank, token: int, stage: Stage) -> None:
        """Interrupt the hook, as the watcher does once the iteration is decided."""
        if rank.token == token and self._is_interrupted(rank):
            self._leave_after(self._cluster.delay(), rank, stage, Result(End.INTERRUPTED))

    def _get_stuck(self, rank: Rank) -> None:
        rank.silent_since = self._clock.now
        self._cluster.stalls(rank, KILLED_AFTER)

    def _result(self, rank: Rank, stage: Stage, fault: Fail | Stall | None) -> Result:
        if not isinstance(fault, Fail):
            return Result(End.RETURNED)
        end = End.FATAL if stage in AFTER_A_FAULT else fault.end
        return Result(end, f"{rank.seat.initial_rank}:{rank.seat.iteration}:{stage.value}", fault.origin)

    def _leave_after(self, duration: Seconds, rank: Rank, stage: Stage, result: Result) -> None:
        self._clock.after(duration, rank, rank.token, self._leave, stage, result)

    def _leave(self, rank: Rank, stage: Stage, result: Result) -> None:
        rank.silent_since = rank.pinged_at = rank.lingers_since = None
        self._cluster.referee.goes_on(rank.truth, self._clock.now)
        rank.does(Doing.WAITING, self._clock.now)
        self._cluster.referee.leaves(rank.truth, stage, result)
        if stage is Stage.ABORT:
            rank.called_at = self._clock.now
            rank.is_answering = True
        self._cluster.step(rank, result)

    # -- the function -----------------------------------------------------------------------------

    def _run_function(self, rank: Rank, fault: Fail | Stall | None) -> None:
        stall = fault.how if isinstance(fault, Stall) else None
        if stall == "stuck":
            self._get_stuck(rank)
        elif stall == "sleep":
            rank.silent_since = self._clock.now
            self._cluster.stalls(rank, KILLED_AFTER)  # or until it is interrupted
        elif stall == "spin":
            rank.pinged_at = self._clock.now
            self._cluster.stalls(rank, KILLED_AFTER)  # or until it is interrupted
        else:
            duration = self._cluster.delay() * self._rng.choice((0.1, 1.0, 10.0))
            if isinstance(fault, Stall):
                self._cluster.comes_late(rank, fault.duration)
                duration += fault.duration
            self._leave_after(duration, rank, Stage.FUNCTION, self._result(rank, Stage.FUNCTION, fault))
        self._when_decided(rank, partial(self._interrupt, rank, rank.token, stall == "stuck"))

    def _interrupt(self, rank: Rank, token: int, is_stuck: bool) -> None:
        """Interrupt the function, which may leave late, as the watcher does once the iteration is decided."""
        if rank.token != token or not self._is_interrupted(rank):
            return None
        rank.interrupted_at = self._clock.now
        if is_stuck:
            return self._cluster.monitors.look(rank.monitor, 0.0)
        linger = rank.linger.pop(rank.seat.iteration, 0.0)
        if linger:
            rank.lingers_since = self._clock.now
            self._cluster.stalls(rank, linger)
        return self._leave_after(self._cluster.delay() + linger, rank, Stage.FUNCTION, Result(End.INTERRUPTED))

    # -- waiting for the decision --------------------------------------------------------------------

    def _when_decided(self, rank: Rank, callback: partial[None]) -> None:
        key = f"{rank.seat.iteration}/outcome"
        if key in self._data:
            callback()
        else:
            self._cluster.store.when_present(key, callback)

    def _is_interrupted(self, rank: Rank) -> bool:
        return self._data.get(f"{rank.seat.iteration}/outcome", COMPLETED) != COMPLETED

    def _reserve_is_over(self, rank: Rank, token: int) -> None:
        if rank.token == token:
            end = End.INTERRUPTED if self._is_interrupted(rank) else End.RETURNED
            self._leave_after(self._cluster.delay(), rank, Stage.RESERVE, Result(end))

    def _abort_is_over(self, rank: Rank, token: int, duration: Seconds) -> None:
        if rank.token == token:
            self._leave_after(duration, rank, Stage.ABORT, Result(End.RETURNED))
