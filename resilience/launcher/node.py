"""What one node's agent has at hand, and what it does with it when something happens.

The shell around `core.supervision`, which decides what ends a cycle and what follows. What workers and monitors have
told stands in `witnesses`."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.utils import macros

from resilience.adapters import processes
from resilience.attribution.symptoms import symptom
from resilience.core import cycle, events
from resilience.core.agent_protocol import Emit, HighestStep, Protocol
from resilience.core.attribution import InterruptionRecord
from resilience.core.budget import Budget, table
from resilience.core.control import Policy, Request
from resilience.core.cycle import Verdict
from resilience.core.job_budget import failure_of
from resilience.core.silences import Rule
from resilience.core.supervision import Rules, Supervision, Workers
from resilience.core.watch import Limits
from resilience.errors import StoreError
from resilience.launcher import program
from resilience.launcher.driving import T
from resilience.launcher.stopping import Stopping
from resilience.launcher.stuck import in_words
from resilience.launcher.warm_start import WarmStart
from resilience.launcher.witnesses import LOOK, Witnesses

if TYPE_CHECKING:
    from resilience.launcher.account import Account
    from resilience.launcher.arguments import Options
    from resilience.launcher.gate import Gate, Patrol, Refusal
    from resilience.launcher.monitors import Monitors
    from resilience.launcher.output import Drain
    from resilience.launcher.rendezvous import Handler
    from resilience.launcher.running import Ended, Running
    from resilience.launcher.signals import Signals
    from resilience.launcher.zygote import Zygote

RankMode = Literal["infrastructure", "deterministic", "backend"]
READY = 5.0  # seconds that the first workers wait for their monitors, which need 0.2 s


class Node:
    """One node's part of the job. Main thread only."""

    def __init__(
        self,
        account: Account,
        handler: Handler,
        monitors: Monitors,
        zygote: Zygote | None,
        drain: Drain | None,
        signals: Signals,
        gate: Gate,
        patrol: Patrol,
        options: Options,
        limits: Limits,
        policy: Policy,
        spec: WorkerSpec,
        mode: RankMode,
    ) -> None:
        """mode: where group ranks come from."""
        self.name = account.node
        self.account = account
        self.handler = handler
        self.monitors = monitors
        self.zygote = zygote
        self.drain = drain
        self.signals = signals
        self.failure: InterruptionRecord | None = None  # the last one that was seen here
        self._gate = gate
        self._patrol = patrol
        self._options = options
        self._limits = limits
        self.policy = policy
        self._spec = spec
        self._mode = mode
        self._known_nodes: set[str] = set()  # names of the nodes of all cycles
        self._warned: set[str] = set()  # checks whose last warning was reported
        self._soiled = ""  # what cannot be ended here
        self.warm_start = WarmStart(account, zygote)
        self.witnesses = Witnesses(account, monitors, limits)
        self._supervision = Supervision(handler.rendezvous, rules_of(policy, spec, options), handler.is_host)
        self.stopping = Stopping(self._supervision, self._run, monitors, signals, self.witnesses)
        self._run(self._supervision.budget.open())

    def _run(self, protocol: Protocol[T]) -> T:
        """Run a protocol of this agent. Raises: StoreError."""
        return self.handler.run(protocol, self._perform)

    def _perform(self, operation: Emit | HighestStep) -> int | None:
        if isinstance(operation, HighestStep):
            return self.witnesses.highest_step()
        self.account.emit(operation.event)
        return None

    @property
    def restarts_used(self) -> int:
        """How many of the job's restarts were used when this cycle began."""
        return self._supervision.restarts_used

    @property
    def has_left(self) -> bool:
        """Whether this node goes while others may stay."""
        return bool(self._supervision.leaves)

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when a monitor or a signal has something to say."""
        drain = [] if self.drain is None else self.drain.filenos()
        return [*self.monitors.filenos(), self.signals.fileno(), self.handler.watch.fileno(), *drain]

    @property
    def is_told(self) -> bool:
        """Whether another agent may have ended the cycle."""
        return self.handler.watch.is_rung

    @property
    def rule(self) -> Rule | None:
        """The rule for silences that have no limit, None if it is switched off."""
        return self._limits.rule

    @property
    def shortest_limit(self) -> float | None:
        """Seconds of silence after which a rank's monitor ends it, at the earliest."""
        limits = self._limits
        weighed = (limits.step, limits.heartbeat, limits.out_of_section, *limits.sections.values())
        return min((limit.hard for limit in weighed if limit.hard is not None), default=None)

    # -- before a cycle -------------------------------------------------------------------------

    def gate(self) -> Verdict | None:
        """Check this node's health; answers a verdict if it must leave. Raises: StoreError."""
        if self.stopping.asked() is not None:
            return self._stopped_while_waiting()
        verdict = self._run(self._supervision.excluded())
        if verdict is not None:
            return verdict
        if self._soiled:
            return self._leave(f"unhealthy: {self._soiled}")
        found = self._gate.refusals(self.signals.has_any)
        self._warn([refusal for refusal in found if refusal.is_warning])
        refusals = [refusal for refusal in found if not refusal.is_warning]
        for refusal in refusals:
            self.account.emit(events.NodeUnhealthy(refusal.check, refusal.detail[:500]))
        if not refusals:
            return None
        return self._leave("unhealthy: " + "; ".join(f"{refusal.check}: {refusal.detail}" for refusal in refusals))

    def _warn(self, warnings: Sequence[Refusal]) -> None:
        """Report each warning once, until the check finds nothing."""
        for warning in warnings:
            if warning.check not in self._warned:
                self.account.emit(events.NodeWarned(warning.check, warning.detail[:500]))
        self._warned = {warning.check for warning in warnings}

    def closed(self, why: str) -> Verdict:
        """What follows from a rendezvous that takes this node no more. Raises: StoreError."""
        if self.signals.has_any():
            return self._stopped_while_waiting()
        return self._run(self._supervision.closed(why))

    def late(self, why: str) -> Verdict:
        """What follows from waiting for a place, or for enough nodes, in vain."""
        return self._supervision.late(why)

    def cut_off(self, why: str) -> Verdict:
        """What follows from the loss of the job's store."""
        why = self.handler.why_cut_off or why
        self.account.emit(events.StoreLost(why[:500]))
        detail = f"the job's store is lost, with the node that hosts it or on the way there: {why}"
        return Verdict("failed", self.name, exit_code=cycle.FAILED, detail=detail)

    def _stopped_while_waiting(self) -> Verdict:
        """A signal came while no workers ran, or the cycle ended with another verdict. Raises: StoreError."""
        self.stopping.asked()
        verdict = self._run(self._supervision.stopped_while_waiting())
        if self.has_left and not self.handler.is_host:
            self.handler.leave(verdict.detail)  # now: the others form the next cycle
        return verdict

    def began(self, group: WorkerGroup) -> Verdict | None:
        """A cycle begins. Return its verdict if it is over already, None if workers may start. Raises: StoreError."""
        self.witnesses.forget()
        verdict = self._run(self._supervision.began())
        if verdict is not None:
            return verdict
        seats = self.handler.formation.seats
        nodes = {seat.node for seat in seats}
        self.witnesses.is_cold = not self._known_nodes.issuperset(nodes)
        self._known_nodes |= nodes
        self.account.emit(
            events.RendezvousCompleted(
                group.group_rank or 0,
                len(seats),
                group.workers[0].world_size,
                self._mode,
                f"{group.master_addr}:{group.master_port}",
            )
        )
        deadline = time.monotonic() + READY
        while not all(map(self.monitors.is_monitored, range(self._spec.local_world_size))):
            self.witnesses.hear()
            if time.monotonic() > deadline:
                break  # they run unmonitored until theirs is there
            time.sleep(LOOK)
        return None

    # -- what happens ---------------------------------------------------------------------------

    def reap(self, running: Running) -> None:
        """Collect what workers have left behind, and the zygote if it is gone."""
        drain = 0 if self.drain is None else self.drain.pid
        known = {*running.pids(), self.handler.store_pid, *self.warm_start.pids, drain}
        known |= {self.monitors.pid(local_rank) or 0 for local_rank in range(self._spec.local_world_size)}
        processes.reap_strangers(known)
        if self.drain is not None:
            self.drain.hear()
        self.warm_start.look(running.notes())

    def soil(self, stuck: Sequence[Ended]) -> None:
        """Workers cannot be ended: what they hold (devices, memory, files) is not free, so none starts here again."""
        self._soiled = in_words(stuck)
        self.account.emit(events.NodeUnhealthy("processes", self._soiled[:500]))

    def request(self) -> Verdict | None:
        """What a signal or a rank asks for, once it stands. Raises: StoreError."""
        if self.stopping.asked() is None:
            self._look_at_devices()
        verdict = self._run(self._supervision.requested(self.witnesses.requests))
        if verdict is None:
            self.stopping.end_terminated_workers()
        return verdict

    def _look_at_devices(self) -> None:
        """A node whose devices fail leaves, as if one of its ranks had asked for that."""
        refusal = self._patrol.refusal(time.monotonic())
        if refusal is not None:
            self.account.emit(events.NodeUnhealthy(refusal.check, refusal.detail[:500]))
            self.witnesses.requests.append(Request("ExcludeThisNode", f"{refusal.check}: {refusal.detail}"[:500]))

    # -- verdicts -------------------------------------------------------------------------------

    def after_failure(self, failures: Sequence[Ended]) -> Verdict | None:
        """What follows from workers that failed here; None if the others go on without them. Raises: StoreError."""
        failure = self.witnesses.record_of(failures[0])
        self.failure = failure
        standing = self._run(self._supervision.standing())
        if standing is not None:
            return standing  # where all of them fail at once, one has said so for all
        what = failure_of(
            failure,
            self.handler.cycle,
            self.name,
            self.witnesses.highest_step(),
            self._run(self._supervision.ran()),
            self._why_not_started(failures[0]),
        )
        return self._run(self._supervision.failed(what))

    def _why_not_started(self, failed: Ended) -> str:
        """Return why the program of a worker that failed cannot start, empty if it can."""
        if failed.code <= 0:
            return ""
        assert isinstance(self._spec.entrypoint, str)
        arguments = macros.substitute(list(self._spec.args), str(failed.local_rank))
        return program.why_not(self._spec.entrypoint, arguments)

    def look(self, running: Running) -> Verdict | None:
        """What others did: a verdict of theirs, the end of the last worker, a node that is lost or wants to join.

        Raises: StoreError, RendezvousConnectionError."""
        done = tuple(sorted(ended.rank for ended in running.ended if ended.code == 0))
        return self._run(self._supervision.look(Workers(bool(running.living), running.apart, done)))

    def failure_of(self, first: InterruptionRecord | None) -> InterruptionRecord | None:
        """Return the failure that the last words name: the one that was first, else what was seen here, unless that
        only followed from another one."""
        if first is None and self.failure is not None and symptom(self.failure).is_own:
            return self.failure
        return first

    def failures(self) -> list[str]:
        """Return what the job failed from, as lines of a table; none if the store is lost."""
        try:
            return table(self._run(self._supervision.budget.history()))
        except StoreError:
            return []

    def let_finish(self, running: Running, verdict: Verdict) -> list[Ended]:
        """Give workers that look for it the time to write a checkpoint and leave; answers who has left.

        Ends at once if none looks, after the grace, and when a person asks again (SIGINT, SIGQUIT): schedulers send
        SIGTERM twice as it is."""
        self.witnesses.ask_to_stop()
        ended: list[Ended] = []
        is_heard = False  # by any: then the others may come to it as well
        deadline = time.monotonic() + self._options.stop_grace
        while running.living and time.monotonic() < deadline:
            if self._has_no_time_left or self._is_hurried(verdict):
                break
            self.witnesses.hear()
            if self.drain is not None:
                self.drain.hear()
            ended += running.collect()
            is_heard |= self.witnesses.is_stop_heard
            if not is_heard and self.witnesses.have_answered(running.pids()):
                break
            time.sleep(LOOK)
        return ended

    def is_urgent(self, verdict: Verdict) -> bool:
        """Return True if workers that were asked to stop must end now: the others may go on without this node, or a
        person asks again."""
        return self._has_no_time_left or (verdict.outcome == "preempted" and self._is_hurried(verdict))

    @property
    def _has_no_time_left(self) -> bool:
        """Whether this node has been cut off from the job's store for so long that the others may go on without it."""
        return self.handler.time_left == 0.0

    def _is_hurried(self, verdict: Verdict) -> bool:
        """Return True if a person asks again. Where the others go on, a signal is kept: it is for this node alone."""
        return verdict.again is None and bool({signal.SIGINT, signal.SIGQUIT} & set(self.signals.take()))

    def stop_limit(self, verdict: Verdict, limit: float) -> float:
        """Return how long workers may take to end, in seconds: `limit`, or --term-timeout if a signal stops the job;
        less if the others go on without this node, for no worker of the old cycle may be at work beside theirs."""
        if verdict.outcome == "preempted" and self._options.term_timeout is not None:
            limit = self._options.term_timeout
        with contextlib.suppress(StoreError):
            may_be_lost = verdict.failure is not None or verdict.outcome == "interrupted"
            if may_be_lost and self.handler.is_taken_for_lost():
                return 0.0
        left = self.handler.time_left  # also if the line was cut just now, while the store was asked
        return limit if left is None else min(left, limit)

    def _leave(self, why: str) -> Verdict:
        return self._run(self._supervision.leave(why))

    def over(self, verdict: Verdict) -> None:
        """The job is over for this node, and for all of them unless only this one leaves. Waits for the others
        where they need this node's store."""
        self._end(self._supervision.over(verdict))

    def failed(self, error: str) -> None:
        """This agent failed by an error of its own, which ends the job for all nodes. Waits as `over` does."""
        self._end(self._supervision.ended_by_error(error))

    def _end(self, protocol: Protocol[object]) -> None:
        with contextlib.suppress(StoreError):
            self._run(protocol)
        self.handler.leave(self._supervision.leaves)


def rules_of(policy: Policy, spec: WorkerSpec, options: Options) -> Rules:
    """Return what is configured for the job's cycles."""
    budget = Budget(
        max_restarts=spec.max_restarts,
        same_limit=options.same_failure_limit,
        stalled_restarts=options.stalled_restarts,
        same_in_window=options.same_failure_in_window,
        window_s=options.failure_window,
        same_exit_code=options.same_failure_exit_code,
    )
    return Rules(policy, budget, options.exit_barrier_timeout, options.on_sigterm, options.stop_grace)
