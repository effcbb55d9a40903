"""What do the monitors of a virtual cluster do?  They watch their ranks, and stand in for dead ones.

The loop of `monitor.server` over `core.watch`: a monitor checks when something happens to its rank and when `decide`
asks for it, and performs the commands. Its work in the store takes operations, between which it may die. A neighbour
then steps in, as in `inprocess._runtime.supervision`."""

from __future__ import annotations

import math
from collections.abc import Generator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from resilience.core import watch
from resilience.core.restart import ENTRY, Keys, Operation, Read, seat_key
from resilience.errors import BarrierTimeout
from resilience.facts import encoding
from resilience.facts.limits import Limit, Limits
from resilience.facts.seats import Seat
from tests.restart_simulation import invariants
from tests.restart_simulation.actors import Errand, Monitor, Rank

if TYPE_CHECKING:
    from tests.restart_simulation.cluster import Cluster

Seconds = float

HARD = 90.0
WATCH = Limits(
    watchdog=Limit(60.0, HARD),
    store=Limit(None, invariants.LIMITS.barrier + 30.0),
    ping=Limit(60.0, HARD),
    hook=Limit(None, HARD),
    leave=Limit(None, HARD),
    grace=5.0,
)
EVIDENCE = 1.0  # most seconds that a monitor takes for its rank's stacks
HEARTBEAT_TIMEOUT = 30.0  # seconds after which a neighbour stands in for a rank whose monitor is gone too


class VirtualMonitors:
    """Moves the monitors of one cluster."""

    token = 0  # events scheduled by neighbours are never stale

    def __init__(self, cluster: Cluster, watcher: ModuleType) -> None:
        self._cluster = cluster
        self._watcher: Any = watcher
        self._clock = cluster.clock
        self._referee = cluster.referee

    def look(self, monitor: Monitor, delay: Seconds) -> None:
        """Schedule a monitor's next check in `delay` seconds, in place of an earlier one. A dead monitor does none."""
        if monitor.is_alive:
            monitor.token += 1
            self._clock.after(max(delay, monitor.busy_until - self._clock.now), monitor, monitor.token, self._check)

    def kill(self, monitor: Monitor) -> None:
        """End a monitor's process."""
        if not monitor.is_alive:
            return
        rank = monitor.rank
        self._cluster.note(f"monitor of {rank}", "killed")
        if rank.stalled_since() is not None:
            self.is_unmonitored(rank)
        self._end(monitor)
        if rank.lives_on and rank.truth.spoken_for is None:
            self._cluster.ends_unrepresented(rank)
        if not rank.truth.is_alive and rank.truth.spoken_for is None and not rank.truth.standing:
            self.is_unspoken(rank)

    def suspect(self, rank: Rank) -> None:
        """Make a neighbour believe that a rank is dead."""
        neighbours = self._neighbours(rank)
        if rank.truth.end is None and neighbours:
            self._referee.suspected(rank.truth)
            self._stand_in(self._cluster.rng.choice(neighbours), rank, "suspected")

    def is_unmonitored(self, rank: Rank) -> None:
        """Note that a rank makes no progress and no monitor will end it."""
        rank.truth.is_unspoken = True
        self._referee.stalls(rank.truth, self._clock.now, math.inf)  # until it dies or goes on

    def is_unspoken(self, rank: Rank) -> None:
        """Note that a dead rank has no stand-in. A neighbour notices after a long enough silence."""
        self._cluster.comes_late(rank, HEARTBEAT_TIMEOUT + 5.0)
        self._clock.after(HEARTBEAT_TIMEOUT + 5.0 * self._cluster.rng.random(), self, 0, VirtualMonitors._step_in, rank)

    # -- the loop of a monitor --------------------------------------------------------------------

    def _check(self, monitor: Monitor) -> None:
        now, rank = self._clock.now, monitor.rank
        state = monitor.watch if monitor.watch.limits is WATCH else watch.Watch(limits=WATCH)
        seen = msgspec.structs.replace(rank.observed(now), are_others_seen=now >= monitor.others_seen_at)
        decision = self._watcher.decide(state, seen, now)
        monitor.watch = decision.state
        for command in decision.commands:
            self._cluster.note(f"monitor of {rank}", command)
            self._perform(monitor, rank, command)
        is_healthy = rank.stalled_since() is None and rank.asks_since is None and rank.interrupted_at is None
        if decision.wake_at is not None and not (is_healthy and rank.truth.end is None and state.finding is None):
            # A healthy rank's next trouble brings its monitor here anyway. So a job that waits for ever comes to rest.
            self.look(monitor, max(0.0, decision.wake_at - now))

    def _perform(self, monitor: Monitor, rank: Rank, command: watch.Command) -> None:
        match command:
            case watch.CaptureEvidence():  # the rank may go on meanwhile
                monitor.busy_until = self._clock.now + EVIDENCE * self._cluster.rng.random()
                monitor.others_seen_at = monitor.busy_until + 2 * watch.EVIDENCE * self._cluster.rng.random()
            case watch.AskRestart():
                record = self._referee.may_say(f"{rank.seat.initial_rank}:{rank.seat.iteration}:silent")
                errand = Errand(monitor, rank, stands_in=False)
                errand.protocol = self._cluster.protocol.report(
                    Keys(rank.seat.iteration), record, rank.seat.initial_rank
                )
                self._send(errand)
            case watch.SendSignal():
                since = rank.stalled_since()
                self._referee.terminated(rank.truth, None if since is None else self._clock.now - since, HARD)
                if not rank.ignores_term:
                    self._cluster.kill(rank)
            case watch.Kill():
                self._cluster.kill(rank)
            case watch.StandIn():
                self._stand_in(monitor, rank, "terminated")
            case watch.Represent():
                self._stand_in(monitor, rank, "raised")
            case watch.Finish():
                self._perhaps_done(monitor)
            case _:  # unknown processes exist only with real processes
                pass

    # -- errands ----------------------------------------------------------------------------------

    def _stand_in(self, monitor: Monitor, rank: Rank, reason: str) -> None:
        rank.truth.standing += 1
        errand = Errand(monitor, rank, stands_in=True)
        errand.protocol = self._represent(errand, self._referee.may_say(f"{rank.seat.initial_rank}:{reason}"))
        self._send(errand)

    def _represent(self, errand: Errand, record: str) -> Generator[Operation, Any, str]:
        """Represent a dead rank, as `inprocess._runtime.monitor_store` does. Return the result."""
        initial = errand.seat.initial_rank
        (text,) = yield Read((seat_key(initial),))
        size = len(self._cluster.ranks)
        errand.seat = encoding.from_json(text, Seat) if text else Seat(initial, initial, size, size, ENTRY)
        self._referee.took_seat(errand.seat, by_stand_in=True)
        try:
            return str((yield from self._cluster.protocol.stand_in(errand.seat, invariants.LIMITS, record)))
        except BarrierTimeout:
            return invariants.TIMEOUT  # it has done its part, whatever delays the others

    def _send(self, errand: Errand) -> None:
        """Start an errand. A monitor's own errands run one after another, those for neighbours in parallel."""
        monitor = errand.monitor
        if errand.rank is monitor.rank and any(waiting.rank is monitor.rank for waiting in monitor.errands):
            monitor.queue.append(errand)
            return
        monitor.errands.append(errand)
        self._cluster.step(errand, None)

    def ended(self, errand: Errand, result: str) -> None:
        """Finish an errand."""
        monitor = errand.monitor
        monitor.errands.remove(errand)
        if errand.stands_in:
            errand.truth.standing -= 1
            self._referee.stood_in(errand.truth, errand.seat, result)
            if errand.rank is monitor.rank and errand.rank.lives_on:  # later its process ends too
                errand.rank.lives_on = False
                self.look(monitor, self._cluster.delay())
        if errand.rank is monitor.rank and monitor.queue:
            self._send(monitor.queue.pop(0))
        self._perhaps_done(monitor)

    def _perhaps_done(self, monitor: Monitor) -> None:
        """End a monitor whose rank's end is on record, even if it still works for neighbours."""
        if monitor.watch.is_over and not any(errand.rank is monitor.rank for errand in monitor.errands):
            self._end(monitor)

    def _end(self, monitor: Monitor) -> None:
        monitor.is_alive = False
        monitor.token += 1
        for errand in monitor.errands + monitor.queue:
            errand.token += 1
            if errand.stands_in:
                errand.truth.standing -= 1
                if errand.rank is not monitor.rank:
                    self.is_unspoken(errand.rank)
        monitor.errands, monitor.queue = [], []

    # -- neighbours -------------------------------------------------------------------------------

    def _step_in(self, rank: Rank) -> None:
        if rank.truth.spoken_for is not None or rank.truth.standing or rank.truth.is_alive:
            return
        neighbours = self._neighbours(rank)
        if neighbours:
            self._stand_in(self._cluster.rng.choice(neighbours), rank, "terminated")
        else:
            rank.truth.is_unspoken = True

    def _neighbours(self, rank: Rank) -> list[Monitor]:
        return [
            neighbour.monitor
            for neighbour in self._cluster.ranks
            if neighbour.monitor.is_alive and neighbour is not rank
        ]
