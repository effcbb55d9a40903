"""What one node's agent has at hand, and what it does with it when something happens.

Every question that ends a cycle is asked here: a failure, a request, another agent's verdict, the end of
the last worker, a node that wants to join, one that is lost. Decisions are `core`'s; one verdict a cycle
stands in the rendezvous, and whoever comes second obeys it."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec

from resilience.core import control, cycle, events
from resilience.core.attribution import Detector, Exit, Interruption, InterruptionRecord
from resilience.core.budget import Budget, Failure, describe, table
from resilience.core.control import Policy, Request
from resilience.core.cycle import Verdict
from resilience.core.watch import Limits
from resilience.launcher import gate
from resilience.launcher.budget import JobBudget, failure_of
from resilience.launcher.cycle_nodes import CycleNodes
from resilience.launcher.monitors import Lost
from resilience.monitor import messages
from resilience.telemetry import signs

if TYPE_CHECKING:
    from resilience.launcher.account import Account
    from resilience.launcher.arguments import Options
    from resilience.launcher.monitors import Monitors
    from resilience.launcher.rendezvous import Handler
    from resilience.launcher.running import Ended, Running
    from resilience.launcher.signals import Signals
    from resilience.launcher.zygote import Zygote

LOOK = 0.002  # seconds between looks for a dead worker's record
READY = 5.0  # seconds that the first workers wait for their monitors, which need 0.2 s


class Node:
    """One node's part of the job. Main thread only."""

    def __init__(
        self,
        account: Account,
        handler: Handler,
        monitors: Monitors,
        zygote: Zygote | None,
        signals: Signals,
        options: Options,
        limits: Limits,
        policy: Policy,
        spec: WorkerSpec,
        least: int,
        mode: Literal["infrastructure", "deterministic"] = "deterministic",
    ) -> None:
        self.name = account.node
        self.account = account
        self.handler = handler
        self.monitors = monitors
        self.zygote = zygote
        self.signals = signals
        self.failure: InterruptionRecord | None = None  # that ended the last cycle, if it was seen here
        self.restarts_used = 0
        self._options = options
        self._limits = limits
        self._policy = policy
        self._spec = spec
        self._budget = JobBudget(
            handler.job_store,
            Budget(
                max_restarts=spec.max_restarts,
                same_limit=options.same_failure_limit,
                startup_restarts=options.startup_restarts,
                same_in_window=options.same_failure_in_window,
                window_s=options.failure_window,
                same_exit_code=options.same_failure_exit_code,
            ),
        )
        self._least = least
        self._mode = mode
        self._gate = gate.Gate(
            gate.checks(account.folder, options.min_free_disk_mb, self._ask_store, options.health_check)
        )
        self._nodes = CycleNodes(handler.job_store, -1, (), self.name)
        self._began_at = 0.0
        self._requests: list[Request] = []
        self._records: dict[int, InterruptionRecord] = {}  # by the worker's pid
        self._gone: set[int] = set()
        self._ranks: dict[int, int] = {}  # of the workers, by local rank
        self._told: dict[int, bool] = {}  # workers that know they are to stop, and whether they look
        self._request: Verdict | None = None
        self._is_excluded = False
        self._step = -1  # the highest that any worker here has told

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when a monitor or a signal has something to say."""
        return [*self.monitors.filenos(), self.signals.fileno()]

    # -- before a cycle -------------------------------------------------------------------------

    def gate(self) -> Verdict | None:
        """Check this node's health; answers a verdict if it must leave."""
        if self._is_excluded:
            return self._leave("a rank asked for this node's exclusion")
        refusals = self._gate.refusals(self.signals.has_any)
        for refusal in refusals:
            self.account.emit(events.NodeUnhealthy(refusal.check, refusal.detail[:500]))
        if refusals:
            return self._leave("; ".join(f"{refusal.check}: {refusal.detail}" for refusal in refusals)[:500])
        return None

    def _ask_store(self) -> None:
        self.handler.is_closed()

    def closed(self, why: str) -> Verdict:
        """What follows from a rendezvous that takes this node no more."""
        if self._is_excluded:
            return self._leave("a rank asked for this node's exclusion")
        reason = self.handler.last_words() or why
        return Verdict("failed", self.name, exit_code=cycle.FAILED, detail=f"the job is over: {reason}")

    def began(self, group: WorkerGroup) -> None:
        """A cycle begins: read what the job has used of its budget, forget the cycle before."""
        seats = self.handler.formation.seats
        self._nodes = CycleNodes(self.handler.job_store, self.handler.cycle, (seat.node for seat in seats), self.name)
        self._began_at = time.monotonic()
        self.account.emit(
            events.RendezvousCompleted(
                group.group_rank or 0,
                len(seats),
                group.workers[0].world_size,
                self._mode,
                f"{group.master_addr}:{group.master_port}",
            )
        )
        self.restarts_used = self._budget.used
        self._records.clear()
        self._gone.clear()
        self._request = None
        self._requests.clear()
        deadline = time.monotonic() + READY
        while not all(map(self.monitors.is_monitored, range(self._spec.local_world_size))):
            self.hear()
            if time.monotonic() > deadline:
                break  # they run unmonitored until theirs is there
            time.sleep(LOOK)

    def watch(self, worker: Worker, files: tuple[str, str, str]) -> None:
        """Have a worker watched by its rank's monitor."""
        origin = msgspec.structs.replace(
            self.account.origin,
            role="rank",
            pid=worker.id,
            initial_rank=worker.global_rank,
            rank=worker.global_rank,
            world_size=worker.world_size,
        )
        self._ranks[worker.local_rank] = worker.global_rank
        output = tuple(file for file in files[:2] if file)
        self.monitors.assign(worker.local_rank, worker.id, origin, self._limits, output)

    def reaped(self, ended: Ended) -> None:
        """Tell a worker's monitor how it ended, for it may have come too late to see it."""
        self.monitors.reaped(ended.local_rank, ended.pid, exit_of(ended))

    # -- what happens ---------------------------------------------------------------------------

    def hear(self) -> None:
        """Take what the monitors say."""
        for local_rank, message in self.monitors.poll(0.0):
            match message:
                case messages.Found(record):
                    self._records.setdefault(record.pid or -1, record)
                    self._step = max(self._step, -1 if record.step is None else record.step)
                case messages.Gone(worker_pid):
                    self._gone.add(worker_pid)
                case Lost(monitor_pid, why):
                    self.account.emit_of(self._ranks.get(local_rank), events.MonitorLost(monitor_pid, why))
                case messages.Stopping(worker_pid, is_heard):
                    self._told[worker_pid] = is_heard
                case messages.Requested(action, description):
                    self.account.emit(events.ControlRequested(action, description, local_rank))
                    self._requests.append(Request(action, description))

    def request(self) -> Verdict | None:
        """What a signal or a rank asks for."""
        for number in self.signals.take():
            name = signal.Signals(number).name
            self.account.emit(events.StopRequested(f"{name} to the agent of {self.name}", self._options.stop_grace))
            self._request = Verdict("preempted", self.name, exit_code=128 + number, detail=f"{name} to {self.name}")
        if self._request is None:
            self._request = control.answer(self._requests, self.name)
            if self._request is not None and self._request.outcome == "preempted":
                self.account.emit(events.StopRequested(self._request.detail, self._options.stop_grace))
            if self._request is not None and self._request.again is not None:
                self._is_excluded = True
                self.handler.exclude(self.name, self._request.detail)
        return self._request

    def await_record(self, ended: Ended, limit: float) -> None:
        """Wait until a dead worker's monitor has told what it knows, `limit` seconds at most."""
        deadline = time.monotonic() + limit
        while ended.pid not in self._gone and time.monotonic() < deadline:
            self.hear()
            if self.monitors.is_monitored(ended.local_rank):
                time.sleep(LOOK)
            else:
                return

    def record_of(self, ended: Ended) -> InterruptionRecord:
        """Return what is known of a worker's failure: its monitor's record; without one, the agent states what
        the exit status says."""
        known = self._records.get(ended.pid)
        if known is not None:
            return known
        record = InterruptionRecord(
            rank=ended.rank,
            interruption=Interruption.TERMINATED,
            message=f"process {ended.pid} ended ({ended.how})",
            exit=exit_of(ended),
            detector=Detector("exit"),
            node=self.name,
            pid=ended.pid,
            detected_wall_ns=time.time_ns(),
        )
        self._records[ended.pid] = record
        self.account.emit(events.Interrupted(record))
        return record

    # -- verdicts -------------------------------------------------------------------------------

    def agree(self, verdict: Verdict) -> Verdict:
        """Let a verdict stand for all agents of this cycle, unless another one does."""
        return cycle.decode(self.handler.end_cycle(cycle.encode(verdict)))

    def standing_verdict(self) -> Verdict | None:
        """Return what another agent has found, None if nobody has."""
        text = self.handler.cycle_end()
        if text is not None:
            return cycle.decode(text)
        if self.handler.is_cycle_ended():
            text = self.handler.cycle_end()  # who closes the rendezvous has said before how the cycle ended
            if text is not None:
                return cycle.decode(text)
            why = self.handler.last_words()
            if why:
                return self.closed(why)
            return Verdict("interrupted", self.name, again="membership", detail="the others went on without this node")
        lost = self.handler.lost_nodes()
        if lost and self._call() == "restart":
            what = f"node {', '.join(lost)} is lost"
            failure = Failure(
                self.handler.cycle, f"lost {lost[0]}", what, lost[0], -1, self._highest_step(), ran=self._ran()
            )
            return self._spend(Verdict("failed", self.name, detail=what), failure)
        return None

    def after_failure(self, failures: Sequence[Ended]) -> Verdict | None:
        """What follows from workers that failed here; None if the others go on without them."""
        self.failure = self.record_of(failures[0])
        if self.failure.exit is not None and self.failure.exit.signal == "SIGTERM":
            # Nobody here sent it: the scheduler takes this rank's place away, which is no failure.
            detail = f"SIGTERM to rank {self.failure.rank}"
            self.account.emit(events.StopRequested(detail, self._options.stop_grace))
            return self.agree(Verdict("preempted", self.name, exit_code=128 + signal.SIGTERM, detail=detail))
        self._nodes.note("failed")
        if self._call() != "restart":
            return None
        verdict = Verdict("failed", self.name, detail=describe(self.failure), rank=self.failure.rank)
        return self._spend(
            verdict, failure_of(self.failure, self.handler.cycle, self.name, self._highest_step(), self._ran())
        )

    def _call(self, waited: float = 0.0) -> control.Call:
        """What the nodes of this cycle call for, as far as it is known here."""
        nodes = self._nodes.look(self.handler.lost_nodes())
        return control.weigh(self._policy, self._least, nodes, waited, self._options.exit_barrier_timeout)

    def _ran(self) -> float:
        return time.monotonic() - self._began_at

    def _highest_step(self) -> int:
        """The highest step that a worker here has told, in this attempt, by records or by its present signs."""
        shown = signs.read_all(self.account.folder, self.name).values()
        steps = [each.step for each in shown if each.origin.attempt == self.account.origin.attempt]
        steps += [record.step for record in self._records.values()]
        self._step = max([self._step, *(step for step in steps if step is not None)])
        return self._step

    def _spend(self, verdict: Verdict, failure: Failure) -> Verdict:
        """Ask the job's budget what a failure brings about; let the answer stand."""
        answer = self._budget.decide(failure)
        if answer.is_restart:
            verdict = msgspec.structs.replace(verdict, again="failure")
        else:
            detail = f"{verdict.detail}; {answer.why}" if answer.why not in verdict.detail else verdict.detail
            verdict = msgspec.structs.replace(verdict, outcome="exhausted", exit_code=answer.exit_code, detail=detail)
        standing = self.agree(verdict)
        if standing == verdict:
            self._budget.spend(failure)
            self.account.emit(
                events.RestartDecided(
                    "restart" if answer.is_restart else "stop",
                    failure.fingerprint,
                    answer.why,
                    answer.used,
                    answer.left,
                    answer.same_in_a_row,
                )
            )
        return standing

    def failures(self) -> list[str]:
        """Return what the job failed from, as lines of a table."""
        return table(self._budget.history())

    def let_finish(self, running: Running) -> list[Ended]:
        """Give workers that look for it the time to write a checkpoint and leave; answers who has left.

        Ends at once if none looks, after the grace, and when a person asks again (SIGINT, SIGQUIT): schedulers send
        SIGTERM twice as it is."""
        self._told.clear()
        self.monitors.request_stop()
        ended: list[Ended] = []
        is_heard = False  # by any: then the others may come to it as well
        deadline = time.monotonic() + self._options.stop_grace
        while running.living and time.monotonic() < deadline:
            if {signal.SIGINT, signal.SIGQUIT} & set(self.signals.take()):
                break
            self.hear()
            ended += running.collect()
            is_answered = all(pid in self._told or pid in self._gone for pid in running.pids())
            is_heard |= any(self._told.values())
            if is_answered and not is_heard:
                break
            time.sleep(LOOK)
        return ended

    def finished(self) -> None:
        """Every worker here is through, and well."""
        self._nodes.note("ended")

    def after_finish(self, waited: float) -> Verdict | None:
        """What follows while this node waits for the others to finish, `waited` seconds so far."""
        call = self._call(waited)
        if call == "completed":
            return self.agree(Verdict("completed", self.name))  # for those that look once we have closed
        if call != "premature":
            return None
        return self.agree(
            Verdict(
                "failed",
                self.name,
                exit_code=cycle.FAILED,
                detail=f"premature completion: the workers of {self.name} ended well {waited:.0f} s before others did",
            )
        )

    def after_membership(self) -> Verdict | None:
        """What follows from nodes that wait to join: with `any-failed` a new cycle, at no cost."""
        if not self.handler.num_nodes_waiting() or not control.takes_newcomers(self._policy, self._nodes.look()):
            return None
        return self.agree(Verdict("interrupted", self.name, again="membership", detail="a node wants to join"))

    def _leave(self, why: str) -> Verdict:
        self.account.emit(events.NodeExcluded(why))
        self.handler.leave(why)
        return Verdict("excluded", self.name, exit_code=cycle.EXCLUDED, detail=why)


def exit_of(ended: Ended) -> Exit:
    """Return a worker's end in the words of records."""
    return Exit(code=ended.code) if ended.code >= 0 else Exit(signal=ended.how)
