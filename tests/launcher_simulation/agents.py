"""What is an agent of a virtual job?

The loop of `launcher.agent` and `launcher.cycle_supervisor` over the protocols of the core.

All decisions are those of `core.supervision` and `core.rendezvous`; here is only what the shell does between them. The
workers of a node are a few numbers: when they are through, when one fails, for how long they outlive their end."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from resilience.core.agent_liveness import LEASE, Lease
from resilience.core.agent_protocol import Operation, Protocol, Seconds, Sleep
from resilience.core.budget import Failure, FailureKind
from resilience.core.control import Request
from resilience.core.cycle import FAILED, CycleDecision
from resilience.core.membership import NodeSeat
from resilience.core.rendezvous import Refusal, Rendezvous
from resilience.core.supervision import Supervision, WorkerStates
from resilience.errors import ConfigurationError, StoreError
from tests.launcher_simulation.schedules import STORE_TIMEOUT

if TYPE_CHECKING:
    from tests.launcher_simulation.jobs import Job

MONITOR_INTERVAL = 1.0  # seconds between two looks of an agent, if nothing happens
SETTLE = 0.3  # seconds in which a dead worker's monitor has told what it knows
SHUTDOWN = 30.0  # seconds in which workers end on SIGTERM


class Wake(msgspec.Struct, frozen=True):
    """Wait until something happens at this agent, `limit` seconds at most."""

    limit: Seconds


class StartWorkers(msgspec.Struct, frozen=True):
    """The cycle's workers start."""


class StopWorkers(msgspec.Struct, frozen=True):
    """The cycle's workers are ended, by SIGKILL after `limit` seconds, because of a verdict. Goes on when they are
    gone."""

    limit: Seconds
    verdict: CycleDecision


class StopCounting(msgspec.Struct, frozen=True):
    """The thread that counts for this agent ends."""


class OwnError(Exception):
    """An error of an agent."""


class Agent:
    """One agent. `life` is what it does; the job performs it."""

    def __init__(self, job: Job, node: int, number: int) -> None:
        """number: how many agents this node had before."""
        schedule = job.schedule
        self.job = job
        self.node = node
        self.id = f"node{node}/{number}"
        self.is_host = schedule.node_hosts_store and node == 0
        self.rendezvous = Rendezvous(self.id, f"node{node}", schedule.terms)
        self.rendezvous.has_lasting_store = not schedule.node_hosts_store
        self.supervision = Supervision(self.rendezvous, schedule.rules, self.is_host)
        self.lease = Lease(STORE_TIMEOUT / LEASE if self.is_host else schedule.terms.lost_after)
        self.counted = 0  # counts that got through
        self.is_counting = True
        self.is_alive = True
        self.has_left = False
        self.has_lost_store = False
        self.is_misconfigured = False
        self.is_broken = False  # has an error of its own
        self.verdict: CycleDecision | None = None
        self.signals: list[tuple[int, str]] = []
        self.first_signal: tuple[int, str] | None = None
        self.is_patient = False  # only SIGINT ends its wait
        self.requests: list[Request] = []
        self.workers: Crew | None = None
        # Of the job: what it waits for.
        self.token = 0
        self.is_watching = False
        self.awaited = ""  # the key that it waits for
        self.sent: Operation | None = None  # what the store has not answered
        self.is_stopping = False
        self.operations = 0
        self.paused_until: Seconds = 0.0
        self.reachable_from: Seconds = 0.0  # partitioned until then
        self.protocol = self.life()

    def __str__(self) -> str:
        return self.id

    @property
    def has_arrived(self) -> bool:
        """Whether it takes part, or waits for a place."""
        known = self.rendezvous.arrivals
        return self.id in known.arrived or known.last.rank_of(self.id) is not None

    @property
    def is_cut_off(self) -> bool:
        return self.lease.time_left(self.job.clock.now) is not None

    @property
    def is_interrupted(self) -> bool:
        return any(name == "SIGINT" or not self.is_patient for _, name in self.signals)

    # -- the agent's loop -------------------------------------------------------------------------

    def life(self) -> Protocol[None]:
        """The loop of the launcher. Ends with the agent's `verdict`."""
        try:
            yield from self.supervision.budget.open()
        except StoreError as error:
            self.verdict = self._cut_off(error)
            return
        try:
            while True:
                verdict = yield from self._cycle()
                if verdict.again is None:
                    end = self.supervision.over(verdict)
                    break
        except OwnError as error:
            verdict = CycleDecision("failed", self.rendezvous.node, exit_code=FAILED, detail=str(error))
            end: Protocol[object] = self.supervision.ended_by_error(str(error))
        except ConfigurationError as error:
            self.is_misconfigured = True
            yield from self._leave("its configuration is wrong")
            self.verdict = CycleDecision("failed", self.rendezvous.node, exit_code=FAILED, detail=str(error))
            return
        with contextlib.suppress(StoreError):
            ended = yield from end
            verdict = ended if isinstance(ended, CycleDecision) else verdict
        yield from self._leave(self.supervision.leaves)
        self.verdict = verdict

    def _cycle(self) -> Protocol[CycleDecision]:
        try:
            verdict = yield from self._gate()
            if verdict is not None:
                return verdict
            ranks = self.job.schedule.ranks
            seat = NodeSeat(self.id, self.rendezvous.node, "here", 1, ranks[self.node] if ranks else None)
            found = yield from self.supervision.join(seat)
            if isinstance(found, Refusal):
                if found.kind == "late":
                    return (yield from self.supervision.late(found.why))
                if self.signals:
                    return (yield from self._stopped_while_waiting())
                return (yield from self.supervision.closed(found.why))
            verdict = yield from self.supervision.began()
            if verdict is None:
                yield from self._take_signals()
                if self.supervision.stop is not None:
                    verdict = yield from self.supervision.requested(())
            if verdict is not None:
                return verdict
        except StoreError as error:
            return self._cut_off(error)
        yield StartWorkers()
        try:
            verdict = yield from self._watch()
        except StoreError as error:
            verdict = self._cut_off(error)
        except OwnError:
            yield StopWorkers(SHUTDOWN, CycleDecision("failed", self.rendezvous.node, detail="the agent failed"))
            raise
        yield StopWorkers((yield from self._stop_limit(verdict)), verdict)
        return verdict

    def _gate(self) -> Protocol[CycleDecision | None]:
        yield from self._take_signals()
        if self.supervision.stop is not None:
            return (yield from self._stopped_while_waiting())
        verdict = yield from self.supervision.excluded()
        if verdict is None and self.job.is_sick(self):
            return (yield from self.supervision.leave("unhealthy"))
        return verdict

    def _take_signals(self) -> Protocol[None]:
        while self.signals:
            yield from self.supervision.signalled(*self.signals.pop(0))

    def _stopped_while_waiting(self) -> Protocol[CycleDecision]:
        yield from self._take_signals()
        verdict = yield from self.supervision.stopped_while_waiting()
        if self.supervision.leaves and not self.is_host:
            yield from self._leave(verdict.detail)
        return verdict

    def _cut_off(self, error: StoreError) -> CycleDecision:
        self.has_lost_store = True
        lost = self.supervision.cut_off("node 0", str(error))
        return self.supervision.stopped_without_store(*self.first_signal, lost) if self.first_signal else lost

    def _stop_limit(self, verdict: CycleDecision) -> Protocol[Seconds]:
        if self.supervision.is_job_over:
            return SHUTDOWN
        try:
            may_be_lost = verdict.failure is not None or verdict.outcome == "interrupted"
            if may_be_lost and (yield from self.rendezvous.is_taken_for_lost()):
                return 0.0
        except StoreError:
            pass
        left = self.lease.time_left(self.job.clock.now)
        return SHUTDOWN if left is None else min(left, SHUTDOWN)

    def _leave(self, reason: str) -> Protocol[None]:
        if self.has_left:
            return
        self.has_left = True
        try:
            yield from self.rendezvous.leave(reason)
            if self.is_host or not self.job.schedule.node_hosts_store:
                is_last = yield from self.rendezvous.await_leaving(self.is_host)
                if is_last and not self.is_host:
                    self.job.referee.deletes(self)
            if self.is_host and self.signals:
                if not (yield from self.rendezvous.newest()).closed:
                    yield from self.supervision.stop_others(*self.signals.pop(0))
                self.is_patient = True
                yield from self.rendezvous.await_leaving(True)
        except StoreError:
            pass
        yield StopCounting()

    # -- while workers run ------------------------------------------------------------------------

    def _watch(self) -> Protocol[CycleDecision]:
        while True:
            yield Wake(MONITOR_INTERVAL)
            verdict = yield from self._look()
            if verdict is not None:
                return verdict

    def _look(self) -> Protocol[CycleDecision | None]:
        crew, supervision = self.workers, self.supervision
        assert crew is not None
        if self.is_broken:
            raise OwnError("the agent failed: RuntimeError")
        yield from self._take_signals()
        verdict = yield from supervision.requested(self.requests)
        if verdict is None and crew.take_failure():
            yield Sleep(SETTLE * self.job.rng.random())
            verdict = yield from supervision.standing()
            if verdict is None:
                verdict = yield from supervision.failed((yield from self._failure(crew)))
        if verdict is None:
            verdict = yield from supervision.look(WorkerStates(crew.is_living))
        return verdict

    def _failure(self, crew: Crew) -> Protocol[Failure]:
        ran = yield from self.supervision.ran()
        what = crew.what
        rendezvous, step = self.rendezvous, self.job.step(self)
        return Failure(rendezvous.cycle, what, what, rendezvous.node, self.node, step, ran=ran, kind=crew.kind)


class Crew:
    """The workers of one agent in one cycle. They live in the job's hands; the agent sees how they ended."""

    def __init__(self, cycle: int, what: str, kind: FailureKind) -> None:
        """what, kind: of their failure, if they fail."""
        self.cycle = cycle
        self.what = what
        self.kind = kind
        self.is_living = True  # as the agent sees it
        self.has_failed = False
        self.ended_well = False
        self.is_hung = False
        self._is_told = False

    def end(self, is_well: bool) -> None:
        self.is_living, self.has_failed, self.ended_well = False, not is_well, is_well

    def take_failure(self) -> bool:
        """Return whether a worker has failed, once."""
        is_new, self._is_told = self.has_failed and not self._is_told, self.has_failed
        return is_new

    @property
    def has_news(self) -> bool:
        """Whether a worker has failed, and the agent has not seen it yet."""
        return self.has_failed and not self._is_told
