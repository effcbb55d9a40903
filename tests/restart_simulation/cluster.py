"""How does a whole job behave?  Virtual ranks and monitors over one memory store, driven by a schedule.

Each rank runs the loop of `inprocess._runtime.call` over `core.restart`, each monitor the loop of `monitor.server` over
`core.watch`; both yield operations as in production. The cluster performs them one at a time, each after a delay drawn
from the schedule's seed: that is the interleaving. A fault may strike between any two operations. There are no threads,
no processes and no waits: a minute of a job takes milliseconds. The `Referee` hears every real event and raises if an
invariant breaks. `testing.virtual_rank` defines what a rank does in each stage."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from random import Random
from types import ModuleType
from typing import Any

import msgspec

from resilience.core import assignment, restart, watch
from resilience.core.observation import Doing
from resilience.core.restart import (
    COMPLETED,
    INTERRUPTED,
    Add,
    Assign,
    Await,
    AwaitOutcome,
    Check,
    CompareSet,
    Operation,
    RunStage,
    Set,
    Settle,
    Unassigned,
    seat_key,
)
from resilience.errors import BarrierTimeout
from resilience.facts.interruptions import missed_completion
from resilience.facts.seats import Seat
from tests.restart_simulation import invariants
from tests.restart_simulation.actors import Actor, Errand, Monitor, Rank
from tests.restart_simulation.clock import VirtualClock
from tests.restart_simulation.faults import (
    Fail,
    FalseSuspicion,
    Freeze,
    KillFault,
    Linger,
    Misassign,
    Pause,
    Raise,
    Schedule,
    Stall,
)
from tests.restart_simulation.invariants import LIMITS, Referee, broken
from tests.restart_simulation.monitors import VirtualMonitors
from tests.restart_simulation.store import MemoryStore
from tests.restart_simulation.virtual_rank import KILLED_AFTER, VirtualRank

Seconds = float
Trace = Callable[[Seconds, str, object], None]
Steps = Generator[Operation, Any, str]


Raised = SystemExit  # the exception that lands in a virtual rank, as from a signal handler

# Durations of one operation: mostly a fraction of a millisecond, sometimes half a second.
DELAYS = tuple(10 ** (-4 + 3.7 * step / 255) for step in range(256))


class ScheduleReport(msgspec.Struct, frozen=True):
    """The outcome of a schedule."""

    iterations: int
    steps: int
    most_operations: int  # of one rank
    seconds: Seconds
    ends: tuple[str, ...]
    vain_waits: tuple[str, ...]  # waits that reached their limit, explained by another rank


class Cluster:
    """One run of one schedule. `run` raises InternalError if an invariant breaks."""

    token = 0  # events scheduled by the cluster itself are never stale

    def __init__(
        self,
        schedule: Schedule,
        protocol: ModuleType = restart,
        watcher: ModuleType = watch,
        trace: Trace | None = None,
    ) -> None:
        self.schedule = schedule
        self.clock = VirtualClock()
        self.store = MemoryStore()
        self.referee = Referee(schedule.ranks, self.store)
        self.rng = Random(-1 - schedule.seed)
        self.protocol: Any = protocol
        self._trace = trace
        self._seat_after = {
            "shift": assignment.shift,
            "fill_gaps": assignment.fill_gaps,
            "grouped": assign_grouped,
        }[schedule.assignment]
        self.ranks = [Rank(truth, self.rng.random() < 0.2) for truth in self.referee.truths]
        self.frozen_until = 0.0  # the store is stopped until then
        self.monitors = VirtualMonitors(self, watcher)
        self._stages = VirtualRank(self)

    def run(self) -> ScheduleReport:
        """Run until no event is left, then settle."""
        block, self.protocol.BLOCK = self.protocol.BLOCK, self.schedule.block
        clock, steps, ended_at = self.clock, 0, 0.0
        faults = 1 + len(self.schedule.faults)
        try:
            self._begin()
            while (due := clock.next()) is not None:
                actor, token, act, *arguments = due
                if actor.token == token:
                    act(actor, *arguments)
                    steps, ended_at = steps + 1, clock.now
                    if clock.now > 1000.0 * faults or steps > 1000 * faults * len(self.ranks):
                        raise broken("every schedule ends", f"not after {clock.now:.0f} s and {steps} steps")
            self.referee.settle()
        finally:
            self.protocol.BLOCK = block
        return ScheduleReport(
            iterations=max(self.referee.worlds) + 1,
            steps=steps,
            most_operations=max(rank.operations for rank in self.ranks),
            seconds=ended_at,
            ends=tuple(rank.truth.end or "hung" for rank in self.ranks),
            vain_waits=tuple(self.referee.vain_waits),
        )

    def note(self, who: object, what: object) -> None:
        if self._trace is not None:
            self._trace(self.clock.now, str(who), what)

    def delay(self) -> Seconds:
        return DELAYS[self.rng.getrandbits(8)] * self.schedule.latency

    # -- the schedule -----------------------------------------------------------------------------

    def _begin(self) -> None:
        for fault in self.schedule.faults:
            rank = self.ranks[fault.rank]
            match fault:
                case KillFault(_, victim, _, at) if at is not None:
                    self.clock.after(at, self, 0, Cluster._strike, rank, victim)
                case KillFault(_, "monitor", operation):
                    rank.monitor.dies_before = operation
                case KillFault(_, victim, operation):
                    rank.dies_before = operation
                    rank.takes_monitor_along = victim == "both"
                case Fail(_, iteration, stage) | Stall(_, iteration, stage):
                    rank.faults[iteration, stage] = fault
                case Misassign(_, iteration):
                    rank.misassigned.add(iteration)
                case Linger(_, iteration, duration):
                    rank.linger[iteration] = duration
                case Pause(_, operation, duration):
                    rank.pauses[operation] = duration
                case Raise(_, operation, times, after):
                    rank.raises |= dict.fromkeys(range(operation, operation + times), after)
                case Freeze(_, at, duration):
                    self.clock.after(at, self, 0, Cluster._freeze, duration)
                case FalseSuspicion(_, at):
                    self.clock.after(at, self.monitors, 0, VirtualMonitors.suspect, rank)
        for rank in self.ranks:
            rank.is_critical = rank.truth.seat.initial_rank == self.schedule.critical
            rank.protocol = self._live(rank)
            self.clock.after(self.delay(), rank, 0, self.step, None)

    def _strike(self, rank: Rank, victim: str) -> None:
        if victim != "monitor":
            self.kill(rank)
        if victim != "rank":
            self.monitors.kill(rank.monitor)

    # -- performing operations --------------------------------------------------------------------

    def step(self, actor: Actor, answer: Any, raised: Raised | None = None) -> None:
        """Send an actor its answer, or raise in it, and schedule its next operation."""
        actor.token += 1
        try:
            operation = actor.protocol.send(answer) if raised is None else actor.protocol.throw(raised)
            while isinstance(operation, Assign):
                operation = actor.protocol.send(self._follow(actor, operation))
        except StopIteration as stop:
            return self._ended(actor, stop.value)
        actor.operation = operation
        self._notice(actor, operation)
        delay = self.delay()
        if actor.pauses:
            delay += self._pause(actor)
        return self.clock.after(delay, actor, actor.token, self._perform)

    def _freeze(self, duration: Seconds) -> None:
        self.note("the store", f"stands still for {duration:.1f} s")
        self.frozen_until = max(self.frozen_until, self.clock.now + duration)
        self.referee.pauses(self.clock.now, duration)

    def _is_held_up(self, actor: Actor, again: Callable[..., None], *arguments: Any) -> bool:
        """Return True if the store is stopped: then repeat the request once it continues."""
        if self.frozen_until <= self.clock.now:
            if isinstance(actor, Rank):
                actor.asks_since = None
            return False
        if isinstance(actor, Rank) and actor.asks_since is None:
            actor.asks_since = self.clock.now
            self.monitors.look(actor.monitor, 0.0)
        self.clock.after(self.frozen_until - self.clock.now + self.delay(), actor, actor.token, again, *arguments)
        return True

    def _perform(self, actor: Actor) -> None:
        """Perform an actor's operation, unless a fault strikes first."""
        operation, process = actor.operation, actor.process
        if not isinstance(operation, RunStage) and self._is_held_up(actor, self._perform):
            return None
        actor.silent_since = None
        process.operations += 1
        if process.operations == process.dies_before:
            return self._struck(process)
        self.note(actor, operation)
        if isinstance(actor, Rank) and process.operations in actor.raises:
            return self._raise(actor, operation)
        if isinstance(operation, Await):
            return self._await(actor, operation)
        if isinstance(operation, RunStage):
            assert isinstance(actor, Rank)
            return self._stages.enter(actor, operation.stage)
        return self.step(actor, self._take_effect(actor, operation))

    def _take_effect(self, actor: Actor, operation: Operation) -> Any:
        """Perform an operation that does not wait, and return its answer."""
        if isinstance(operation, Settle):
            self.referee.settled(actor.truth, operation.origin)
            return None
        if not isinstance(operation, (Set, CompareSet)):
            return self.store.perform(operation)
        before = self.store.data.get(operation.key)
        answer = self.store.perform(operation)
        self.referee.wrote(actor.truth, isinstance(actor, Errand) and actor.stands_in, operation, before)
        return answer

    def _raise(self, rank: Rank, operation: Operation) -> None:
        """Raise in a rank before its operation, or after the operation has taken effect."""
        self.note(rank, "raises")
        if rank.raises[rank.operations] and not isinstance(operation, (Await, RunStage)):
            self._take_effect(rank, operation)
        self.step(rank, None, Raised())

    def _await(self, actor: Actor, operation: Await) -> None:
        if isinstance(actor, Rank):
            actor.does(Doing.WAITING, self.clock.now)
        if operation.key in self.store.data:
            return self.step(actor, True)
        self.store.when_present(operation.key, partial(self._tell, actor, actor.token))
        return self.clock.after(operation.limit, actor, actor.token, self._overdue)

    def _tell(self, actor: Actor, token: int) -> None:
        """Wake an actor a moment after the key that it waits for exists."""
        if actor.token == token and not self._is_held_up(actor, self.step, True):
            self.clock.after(self.delay(), actor, token, self.step, True)

    def _overdue(self, actor: Actor) -> None:
        """End a wait at its limit. Like a store's client, check the key once more."""
        if self._is_held_up(actor, self._overdue):
            return
        operation = actor.operation
        assert isinstance(operation, Await)
        is_there = operation.key in self.store.data
        if not is_there:
            self.referee.overdue(actor.truth, actor.seat, operation.key, operation.limit, self.clock.now)
        if not is_there and isinstance(operation, AwaitOutcome):
            self.referee.may_say(missed_completion(actor.seat, operation.limit))
        self.step(actor, is_there)

    def _notice(self, actor: Actor, operation: Operation) -> None:
        """Report to the referee what an actor's next operation shows about its position."""
        if isinstance(actor, Rank):
            if actor.published != actor.seat.iteration:
                if not isinstance(operation, Set) or operation.key != seat_key(actor.seat.initial_rank):
                    raise broken("seats are published", f"{actor.seat} asks for {operation} before it has said so")
                actor.published = actor.seat.iteration
            elif actor.is_answering and not isinstance(operation, (Set, Check)):
                actor.is_answering = False
                self.referee.answered(actor.seat)
        elif isinstance(operation, Await) or (isinstance(operation, Add) and operation.amount == 0):
            self.referee.answered(actor.seat)

    def _pause(self, actor: Actor) -> Seconds:
        assert isinstance(actor, Rank)
        duration = actor.pauses.pop(actor.operations + 1, 0.0)
        if duration:  # it is stopped until its monitor ends it after the hard limit: no longer wait is excused
            self.stalls(actor, min(duration, KILLED_AFTER))
            actor.silent_since = self.clock.now
            if (
                not isinstance(actor.operation, RunStage) and self.rng.random() < 0.5
            ):  # its page says that it asks the store
                actor.asks_since = self.clock.now
        return duration

    def _struck(self, process: Rank | Monitor) -> None:
        if isinstance(process, Rank):
            self._strike(process, "both" if process.takes_monitor_along else "rank")
        else:
            self.monitors.kill(process)

    def _ended(self, actor: Actor, result: str) -> None:
        if isinstance(actor, Rank):
            if actor.has_left and (not actor.monitor.is_alive or self.rng.random() < 0.5):
                self.ends_unrepresented(actor)
            else:
                actor.lives_on = actor.has_left
                self.referee.ended(actor.truth, result)
                actor.does(Doing.OUTSIDE, self.clock.now)
                self.monitors.look(actor.monitor, self.delay())
        elif isinstance(actor, Errand):
            self.monitors.ended(actor, result)

    # -- the life of a rank -----------------------------------------------------------------------

    def _live(self, rank: Rank) -> Steps:
        """Run the loop of `inprocess._runtime.call`. Return how the rank ended."""
        self.referee.entered(rank.seat)
        try:
            ending = yield from self.protocol.enter(rank.seat, LIMITS)
            while True:
                self.referee.moves_on(rank.truth, ending.terminated)
                following = self._assigned(rank, rank.seat, ending.terminated)
                if following is None:
                    yield from self.protocol.discard(rank.seat, ending.terminated)
                    return invariants.DISCARDED
                if isinstance(following, Unassigned):
                    return (yield from self._leave(rank, invariants.RAISED))
                rank.seat = rank.truth.seat = following
                rank.interrupted_at = None
                self.referee.took_seat(following, by_stand_in=rank.truth.is_suspected)
                ending = yield from self.protocol.iterate(following, LIMITS)
                if ending.outcome == COMPLETED:
                    self.referee.completed(rank.truth)
                    yield from self.protocol.depart(following, LIMITS, rank.is_critical)
                    if rank.is_critical:
                        self.referee.departed(rank.truth)
                if ending.outcome != INTERRUPTED:
                    return str(ending.outcome)
        except BarrierTimeout:
            return (yield from self._leave(rank, invariants.TIMEOUT))
        except Raised:
            return (yield from self._leave(rank, invariants.RAISED))

    def _leave(self, rank: Rank, reason: str) -> Steps:
        """Represent a rank in which an exception landed, unless another exception prevents that. The rank says goodbye
        only after its last operation."""
        self.referee.suspected(rank.truth)
        rank.published, rank.is_answering = rank.seat.iteration, False
        try:
            record = self.referee.may_say(f"{rank.seat.initial_rank}:{reason}")
            has_waited = reason == invariants.TIMEOUT
            result = yield from self.protocol.leave(rank.seat, LIMITS, record, has_waited=has_waited)
        except BarrierTimeout:
            result = invariants.TIMEOUT  # it has done its part, whatever delays the others
        except Raised:
            rank.has_left = True  # without a goodbye
            return invariants.RAISED
        if reason == invariants.RAISED:
            self.referee.stood_in(rank.truth, rank.seat, result)
        return reason

    def ends_unrepresented(self, rank: Rank) -> None:
        """End the process of a rank that left without a goodbye."""
        rank.truth.end, rank.lives_on = None, False
        self.kill(rank)

    def _assigned(self, actor: Actor, seat: Seat, terminated: frozenset[int]) -> Seat | Unassigned | None:
        following = self._seat_after(seat, terminated)
        if following is None:
            actor.truth.is_grouped |= seat.rank not in terminated
        if seat.rank not in terminated and seat.iteration in self.ranks[seat.initial_rank].misassigned:
            return Unassigned(len(self.ranks))
        if following is None:
            return None
        active = min(self.schedule.active, following.world_size)
        return msgspec.structs.replace(following, active_world_size=active)

    def _follow(self, actor: Actor, operation: Assign) -> Seat | Unassigned | None:
        """Move a stand-in to the next seat that its rank would have got."""
        self.referee.agreed(operation.seat, operation.terminated)
        following = operation.place or self._assigned(actor, operation.seat, operation.terminated)
        if isinstance(following, Seat):
            actor.seat = following
            self.referee.took_seat(following, by_stand_in=True)
            if isinstance(actor, Rank):
                actor.published = following.iteration
        return following

    def stalls(self, rank: Rank, duration: Seconds) -> None:
        """Note that a rank stops making progress, so its monitor has to check it."""
        self.comes_late(rank, duration)
        if rank.monitor.is_alive:
            self.monitors.look(rank.monitor, 0.0)
        else:
            self.monitors.is_unmonitored(rank)

    def comes_late(self, rank: Rank, duration: Seconds) -> None:
        """Note that a rank, or its stand-in, keeps the other ranks waiting for this long."""
        self.referee.stalls(rank.truth, self.clock.now, duration)

    def kill(self, rank: Rank) -> None:
        """Kill a rank's process."""
        if rank.truth.end is not None:
            return
        self.note(rank, "killed")
        rank.token += 1
        self.referee.died(rank.truth, self.clock.now)
        if rank.monitor.is_alive:
            self.monitors.look(rank.monitor, self.delay())
        else:
            self.monitors.is_unspoken(rank)


def assign_grouped(seat: Seat, terminated: frozenset[int]) -> Seat | None:
    """Assign as FilterGroupedByKey does: two neighbours form a node and leave together."""
    nodes = {rank // 2 for rank in terminated}
    return assignment.shift(seat, frozenset(rank for rank in range(seat.world_size) if rank // 2 in nodes))
