"""What does one node's agent do when something happens in a cycle?

The shell around `core.supervision`, which decides what ends a cycle and what follows. `witnesses` holds what workers
and monitors have reported."""

from __future__ import annotations

import contextlib
import errno
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.utils import macros

from resilience.attribution.symptoms import symptom
from resilience.calibration.limits_file import holds_in
from resilience.core.agent_protocol import Emit, HighestStep, NodeOperation, NodeProtocol
from resilience.core.budget import Budget, table
from resilience.core.control import Policy, Request
from resilience.core.cycle import CycleDecision
from resilience.core.job_budget import failure_of
from resilience.core.supervision import Rules, Supervision, WorkerStates
from resilience.errors import LaunchError, StoreError
from resilience.facts import events
from resilience.facts.interruptions import InterruptionRecord
from resilience.facts.limits import Limits, Rule
from resilience.launcher.event_reporter import why_failed
from resilience.launcher.rendezvous.driving import T
from resilience.launcher.stopping import NodeSignals
from resilience.launcher.warm_start import WarmStart
from resilience.launcher.witnesses import LOOK, Witnesses
from resilience.launcher.worker import program
from resilience.launcher.worker.unkillable import Uninterruptible, in_words
from resilience.system import processes
from resilience.system.environment import UNINTERRUPTIBLE_LIMIT, uninterruptible_limit

if TYPE_CHECKING:
    from resilience.launcher.arguments import Options
    from resilience.launcher.event_reporter import NodeEvents
    from resilience.launcher.monitors import Monitors
    from resilience.launcher.output.destinations import DrainProcess
    from resilience.launcher.preflight import PeriodicCheck, Preflight, PreflightFailure
    from resilience.launcher.rendezvous.handler import Handler
    from resilience.launcher.signals import Signals
    from resilience.launcher.worker.worker_processes import EndedWorker, RunningWorkers
    from resilience.launcher.worker.zygote import Zygote

RankMode = Literal["infrastructure", "deterministic", "backend"]
OF_NODE = (
    frozenset(  # errors of execve(2) that another node may not have: it lacks a resource, or its file server fails
        (
            errno.EMFILE,
            errno.ENFILE,
            errno.EAGAIN,
            errno.ENOMEM,
            errno.EIO,
            errno.ESTALE,
            errno.ETIMEDOUT,
            errno.ENOTCONN,
            errno.EHOSTDOWN,
        )
    )
)
READY = 5.0  # seconds that the first workers wait for their monitors; a monitor needs 0.2 s


class CycleSupervisor:
    """One node's part of the job. Main thread only."""

    def __init__(
        self,
        reporter: NodeEvents,
        handler: Handler,
        monitors: Monitors,
        zygote: Zygote | None,
        drain: DrainProcess | None,
        signals: Signals,
        preflight: Preflight,
        periodic_check: PeriodicCheck,
        options: Options,
        limits: Limits,
        policy: Policy,
        spec: WorkerSpec,
        mode: RankMode,
    ) -> None:
        """mode: the source of group ranks."""
        self.name = reporter.node
        self.reporter = reporter
        self.handler = handler
        self.monitors = monitors
        self.zygote = zygote
        self.drain = drain
        self.signals = signals
        self.failure: InterruptionRecord | None = None  # the last failure on this node in this cycle
        self._preflight = preflight
        self._periodic_check = periodic_check
        self._options = options
        self._limits = limits
        self.policy = policy
        self._spec = spec
        self._mode = mode
        self._known_nodes: set[str] = set()  # names of the nodes of all cycles
        self._last_world_size = 0  # ranks of the last cycle
        self._warned: set[str] = set()  # checks whose last warning was reported
        self._unusable = ""  # why workers may not start here: processes that cannot be killed
        self._uninterruptible = Uninterruptible(uninterruptible_limit())
        self.warm_start = WarmStart(reporter, zygote)
        self.witnesses = Witnesses(reporter, monitors, limits)
        self._supervision = Supervision(handler.rendezvous, rules_of(policy, spec, options), handler.is_host)
        handler.join = lambda seat: self._run(self._supervision.join(seat))
        handler.stop_job = self._stop_others
        self.stopping = NodeSignals(self._supervision, self._run, monitors, signals, self.witnesses)
        self._run(self._supervision.budget.open())

    def _run(self, protocol: NodeProtocol[T]) -> T:
        """Run a protocol of this agent. Raises: StoreError."""
        return self.handler.run_for_node(protocol, self._perform)

    def _perform(self, operation: NodeOperation) -> int | None:
        match operation:
            case HighestStep():
                return self.witnesses.highest_step()
            case Emit(event, cycle):
                self.reporter.emit_of_cycle(cycle, event)
                return None

    @property
    def restarts_used(self) -> int:
        """Return how many of the job's restarts were used when this cycle began."""
        return self._supervision.restarts_used

    @property
    def has_left(self) -> bool:
        """Return True if this node leaves while others may stay."""
        return bool(self._supervision.leaves)

    @property
    def descriptors(self) -> list[int]:
        """Return the descriptors that become readable when a monitor, signal, store key or drain process has news."""
        drain = [] if self.drain is None else self.drain.filenos()
        return [*self.monitors.filenos(), self.signals.fileno(), self.handler.watch.fileno(), *drain]

    @property
    def may_be_over(self) -> bool:
        """Return True if another agent may have ended the cycle."""
        return self.handler.watch.may_exist

    @property
    def rule(self) -> Rule | None:
        """Return the rule for silences without a limit; None if it is switched off."""
        return self._limits.rule

    @property
    def shortest_limit(self) -> float | None:
        """Return the shortest silence in seconds after which a monitor kills its rank."""
        limits = self._limits
        all_limits = (limits.step, limits.heartbeat, limits.out_of_section, *limits.sections.values())
        return min((limit.hard for limit in all_limits if limit.hard is not None), default=None)

    # -- before a cycle -------------------------------------------------------------------------

    def run_preflight(self) -> CycleDecision | None:
        """Begin the way to the next cycle: check this node's health; return a verdict if it must leave.

        Raises: StoreError."""
        self.failure = None  # the job recovers from that of the previous cycle
        if self.stopping.asked() is not None:
            return self._stopped_while_waiting()
        verdict = self._run(self._supervision.excluded())
        if verdict is not None:
            return verdict
        if self._unusable:
            return self.unhealthy(self._unusable)
        outcomes = self._preflight.refusals(self.signals.has_any)
        self._warn([refusal for refusal in outcomes if refusal.is_warning])
        refusals = [refusal for refusal in outcomes if not refusal.is_warning]
        for refusal in refusals:
            self.reporter.emit(events.NodeUnhealthy(refusal.check, refusal.detail[:500]))
        if not refusals:
            return None
        return self.unhealthy("; ".join(f"{refusal.check}: {refusal.detail}" for refusal in refusals))

    def _warn(self, warnings: Sequence[PreflightFailure]) -> None:
        """Report each warning once, until its check passes again."""
        for warning in warnings:
            if warning.check not in self._warned:
                self.reporter.emit(events.NodeWarned(warning.check, warning.detail[:500]))
        self._warned = {warning.check for warning in warnings}

    def closed(self, reason: str) -> CycleDecision:
        """Return what follows if the rendezvous no longer accepts this node. Raises: StoreError."""
        if self.signals.has_any():
            return self._stopped_while_waiting()
        return self._run(self._supervision.closed(reason))

    def late(self, reason: str) -> CycleDecision:
        """Return what follows if this node waited in vain for a place or for enough nodes. Raises: StoreError."""
        return self._run(self._supervision.late(reason))

    def cut_off(self, reason: str) -> CycleDecision:
        """Return what follows from the loss of the job's store. If a signal has come, the node stops as it asks."""
        self.look_after_stores()
        verdict = self._supervision.cut_off(self.handler.store_address, self.handler.why_cut_off or reason)
        self.reporter.emit(events.StoreLost(verdict.detail[:500]))
        number = self.signals.first
        if number is None:
            return verdict
        stopped = self._supervision.stopped_without_store(number, signal.Signals(number).name, verdict)
        if self._supervision.stop is None:
            self.reporter.emit(events.StopRequested(stopped.detail, self._options.stop_grace))
        return stopped

    def _stopped_while_waiting(self) -> CycleDecision:
        """Return what follows from a signal that came while no workers ran, or during a cycle with another verdict.

        Raises: StoreError."""
        self.stopping.asked()
        verdict = self._run(self._supervision.stopped_while_waiting())
        if self.has_left and not self.handler.is_host:
            self.handler.leave(verdict.detail)  # now, because the others form the next cycle
        return verdict

    def began(self, group: WorkerGroup) -> CycleDecision | None:
        """Begin a cycle. Return its verdict if it is over already, None if workers may start. Raises: StoreError."""
        self.witnesses.forget()
        verdict = self._run(self._supervision.began())
        if verdict is None and self.stopping.asked() is not None:  # a signal came while the cycle was formed
            verdict = self._run(self._supervision.requested(()))
        is_store_gone = self.handler.is_cycle_store_gone
        self.look_after_stores()
        if verdict is None and is_store_gone:  # since this node arrived; the next cycle has another
            detail = f"the store process of {self.name} is gone"
            again = CycleDecision("interrupted", self.name, again="membership", detail=detail)
            verdict = self._run(self._supervision.agree(again))
        if verdict is not None:
            return verdict
        seats = self.handler.membership.seats
        nodes = {seat.node for seat in seats}
        if not self._known_nodes and not group.group_rank and self.handler.cycle:  # a newcomer speaks for all nodes
            self.reporter.console.cause = self._run(self._supervision.cause_of_cycle())
        self.witnesses.is_cold = not self._known_nodes.issuperset(nodes)
        self._known_nodes |= nodes
        self.reporter.console.repeats = self._supervision.budget.same_in_a_row
        self.reporter.emit(
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
                break  # workers run unmonitored until their monitors are ready
            time.sleep(LOOK)
        return None

    def report_unlearned_limits(self, group: WorkerGroup) -> None:
        """Report that learned limits do not hold with this cycle's number of ranks, unless the last cycle had as many.
        One node reports it for all."""
        world_size = group.workers[0].world_size
        is_new = world_size != self._last_world_size
        self._last_world_size = world_size
        if is_new and not group.group_rank and not holds_in(self._limits, world_size):
            self.reporter.emit(events.TimeoutsUnlearned(world_size, *(self._limits.worlds or (0, 0))))

    # -- what happens ---------------------------------------------------------------------------

    def reap(self, running: RunningWorkers) -> None:
        """Reap orphaned processes of workers, take news of the drain process and notes of the workers."""
        drain_pid = 0 if self.drain is None else self.drain.pid
        known_pids = {*running.pids(), self.handler.store_pid, *self.warm_start.pids, drain_pid}
        known_pids |= {self.monitors.pid(local_rank) or 0 for local_rank in range(self._spec.local_world_size)}
        processes.reap_strangers(known_pids)
        self.look_after_drain()
        self.look_after_stores()
        self.warm_start.look(running.notes(), self.is_cut_off())

    def look_after_drain(self) -> None:
        """Take news of the drain process, and replace it if it is gone: workers that write would wait."""
        if self.drain is not None:
            self.drain.hear()

    def look_after_stores(self) -> None:
        """Report what happened to this node's store process; a lost one is replaced if the job can go on."""
        for event in self.handler.store_news():
            self.reporter.emit(event)

    def mark_unusable(self, unkillable: Sequence[EndedWorker]) -> None:
        """Start no worker here again: processes that cannot be killed still hold devices, memory and files."""
        self._unusable = in_words(unkillable)
        self.reporter.emit(events.NodeUnhealthy("processes", self._unusable[:500]))

    def kill_uninterruptible(self, running: RunningWorkers) -> None:
        """Kill workers that wait in the kernel for longer than the user allows. If they do not end, they are given up,
        and this node leaves."""
        for pid in self._uninterruptible.exceeded(running.pids()):
            if not self.witnesses.is_killed(pid):
                place, limit = processes.waits_in(pid) or "the kernel", self._uninterruptible.limit
                reason = f"in an uninterruptible wait in {place} for {limit:g} s ({UNINTERRUPTIBLE_LIMIT})"
                self.reporter.emit(events.NodeWarned("processes", f"process {pid} is killed: {reason}"))
                self.witnesses.killed(pid)
                running.kill(pid)

    def request(self) -> CycleDecision | None:
        """Return the decision that a signal or a rank requests, once it stands. Raises: StoreError."""
        if self.stopping.asked() is None:
            self._check_devices()
        verdict = self._run(self._supervision.requested(self.witnesses.requests))
        if verdict is None:
            self.stopping.end_terminated_workers()
        return verdict

    def cannot_start_workers(self, error: LaunchError) -> CycleDecision:
        """Return what follows if this node cannot start its workers. Raises: StoreError."""
        cause = error.__cause__
        of_program = (errno.ENOENT, errno.EACCES, errno.E2BIG)
        is_of_node = isinstance(cause, OSError) and cause.errno not in of_program
        return self._run(self._supervision.cannot_start(str(error)[:500], is_of_node))

    def cannot_execute_program(self, error: LaunchError) -> CycleDecision:
        """Return what follows if the kernel refuses to execute the workers' program here. Raises: StoreError."""
        cause = error.__cause__
        is_of_node = isinstance(cause, OSError) and cause.errno in OF_NODE
        return self._run(self._supervision.cannot_start(str(error)[:500], is_of_node))

    def _check_devices(self) -> None:
        """Request that this node leave if its devices fail, as if one of its ranks had requested it."""
        refusal = self._periodic_check.refusal(time.monotonic())
        if refusal is not None:
            self.reporter.emit(events.NodeUnhealthy(refusal.check, refusal.detail[:500]))
            self.witnesses.requests.append(Request("ExcludeThisNode", f"{refusal.check}: {refusal.detail}"[:500]))

    # -- verdicts -------------------------------------------------------------------------------

    def after_failure(self, failures: Sequence[EndedWorker]) -> CycleDecision | None:
        """Return what follows from workers that failed here; None if the others continue. Raises: StoreError."""
        failure = self.witnesses.record_of(failures[0])
        self.failure = failure
        standing_verdict = self._run(self._supervision.standing())
        if standing_verdict is not None:
            return standing_verdict  # if workers fail on all nodes at once, one agent has already decided for all
        job_failure = failure_of(
            failure,
            self.handler.cycle,
            self.name,
            self.witnesses.highest_step(),
            self._run(self._supervision.ran()),
            self._why_cannot_start(failures[0]),
            program.is_python(str(self._spec.entrypoint), self._spec.args),
        )
        return self._run(self._supervision.failed(job_failure))

    def _why_cannot_start(self, failed: EndedWorker) -> str:
        """Return why a failed worker's program cannot start, empty if it can."""
        if failed.code <= 0:
            return ""
        assert isinstance(self._spec.entrypoint, str)
        arguments = macros.substitute(list(self._spec.args), str(failed.local_rank))
        return program.why_not(self._spec.entrypoint, arguments)

    def look(self, running: RunningWorkers) -> CycleDecision | None:
        """Return what follows from others: a verdict, the end of the last worker, a node that is lost or wants to join.

        Raises: StoreError, RendezvousConnectionError."""
        done = tuple(sorted(ended.rank for ended in running.ended if ended.code == 0))
        return self._run(self._supervision.look(WorkerStates(bool(running.living), running.apart, done)))

    def failure_of(self, first: InterruptionRecord | None) -> InterruptionRecord | None:
        """Return the failure for the last message: the first failure of the cycle, else this node's own, unless that
        was only a consequence of another failure."""
        if first is None and self.failure is not None and symptom(self.failure).is_own:
            return self.failure
        return first

    def failures(self) -> list[str]:
        """Return the job's failures as lines of a table; no lines if the store is lost."""
        try:
            return table(self._run(self._supervision.budget.history()))
        except StoreError:
            return []

    def let_finish(self, running: RunningWorkers, verdict: CycleDecision) -> list[EndedWorker]:
        """Give workers that check for a stop request time to write a checkpoint and exit; return those that exited.

        Return at once if no worker checks, after the grace period, or if a person asks again (SIGINT, SIGQUIT; not
        SIGTERM, which schedulers send twice anyway)."""
        self.witnesses.ask_to_stop()
        ended: list[EndedWorker] = []
        is_heard = False  # by any worker: then the others may check later
        deadline = time.monotonic() + self._options.stop_grace
        while running.living and time.monotonic() < deadline:
            if self._has_no_time_left or self.stopping.is_hurried(verdict):
                break
            self.witnesses.hear()
            if self.drain is not None:
                self.drain.hear()
            for worker in running.collect():
                self.witnesses.reaped(worker)  # before the others have ended: its monitor does not wait for them
                ended.append(worker)
            is_heard |= self.witnesses.is_stop_heard
            if not is_heard and self.witnesses.have_answered(running.pids()):
                break
            time.sleep(LOOK)
        return ended

    def is_urgent(self, verdict: CycleDecision) -> bool:
        """Return True if workers that were asked to stop must end now: the others may continue without this node, or
        a person asks again."""
        return self._has_no_time_left or (verdict.outcome == "preempted" and self.stopping.is_hurried(verdict))

    def is_cut_off(self) -> bool:
        """Return True if this node is cut off from the job's store, so the others may soon continue without it."""
        return self.handler.time_left is not None

    @property
    def _has_no_time_left(self) -> bool:
        """Return True if this node has been cut off so long that the others may continue without it. They do not if
        the job is over: then the store ends with its host."""
        return not self._supervision.is_job_over and self.handler.time_left == 0.0

    def stop_limit(self, verdict: CycleDecision, limit: float) -> float:
        """Return how many seconds workers may take to end: `limit`, or --term-timeout if a signal stops the job. Return
        less if the others may continue without this node: no old worker may still run beside their new ones."""
        if verdict.outcome == "preempted" and self._options.term_timeout is not None:
            limit = self._options.term_timeout
        if self._supervision.is_job_over:
            return limit
        with contextlib.suppress(StoreError):
            may_be_lost = verdict.failure is not None or verdict.outcome == "interrupted"
            if may_be_lost and self.handler.is_taken_for_lost():
                return 0.0
        time_left = self.handler.time_left  # read last: the request to the store may have shown that we are cut off
        return limit if time_left is None else min(time_left, limit)

    def unhealthy(self, reason: str) -> CycleDecision:
        """Return the verdict of a node that leaves because it cannot run workers."""
        return self._run(self._supervision.leave(f"unhealthy: {reason}"))

    def over(self, verdict: CycleDecision) -> None:
        """End the job for this node, and for all nodes unless only this one leaves. Wait for the others if they need
        this node's store."""
        if verdict.outcome == "preempted":
            self.signals.ignore_first()  # so that it does not count as a person's second signal
        self._end(self._supervision.over(verdict))

    def failed(self, error: Exception) -> None:
        """End the job for all nodes after an error of this agent, or only this node's part if the job can continue
        without it. Record the end, then wait as `over` does."""
        with contextlib.suppress(StoreError):
            self._run(self._supervision.ended_by_error(why_failed(self.name, error)))
        self.reporter.agent_failed(error, self.has_left)
        self.handler.leave(self._supervision.leaves)

    def _stop_others(self) -> None:
        """Stop the job, which continues without this node and needs its store, because a signal came. Raises:
        StoreError."""
        number = self.signals.take_first()
        self._run(self._supervision.stop_others(number, signal.Signals(number).name))

    def _end(self, protocol: NodeProtocol[object]) -> None:
        with contextlib.suppress(StoreError):
            self._run(protocol)
        self.handler.leave(self._supervision.leaves)


def rules_of(policy: Policy, spec: WorkerSpec, options: Options) -> Rules:
    """Return the rules for the job's cycles, from the options."""
    budget = Budget(
        max_restarts=spec.max_restarts,
        same_limit=options.same_failure_limit,
        stalled_restarts=options.stalled_restarts,
        same_in_window=options.same_failure_in_window,
        window_s=options.failure_window,
        same_exit_code=options.same_failure_exit_code,
    )
    return Rules(policy, budget, options.exit_barrier_timeout, options.on_sigterm, options.stop_grace)
