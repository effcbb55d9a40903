"""What one node's agent has at hand, and what it does with it when something happens.

Every question that ends a cycle is asked here: a failure, a request, another agent's verdict, the end of
the last worker, a node that wants to join, one that is lost. Decisions are `core`'s; one verdict a cycle
stands in the rendezvous, and whoever comes second obeys it. Of a failure, only the agent of its node
decides, which knows it, or whoever notices that this agent is lost."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from resilience.adapters import processes
from resilience.core import control, cycle, events
from resilience.core.attribution import Detector, Exit, Interruption, InterruptionRecord
from resilience.core.budget import Budget, Failure, table
from resilience.core.control import Nodes, Policy, Request
from resilience.core.cycle import Verdict
from resilience.core.watch import Limits
from resilience.errors import StoreError
from resilience.launcher.budget import JobBudget, failure_of
from resilience.launcher.cycle_nodes import CycleNodes
from resilience.launcher.monitors import Lost
from resilience.launcher.stuck import Killed, in_words
from resilience.monitor import messages
from resilience.telemetry import signs

if TYPE_CHECKING:
    from resilience.core.gathering import Around
    from resilience.launcher.account import Account
    from resilience.launcher.arguments import Options
    from resilience.launcher.gate import Gate, Patrol
    from resilience.launcher.monitors import Monitors
    from resilience.launcher.rendezvous import Handler
    from resilience.launcher.running import Ended, Running
    from resilience.launcher.signals import Signals
    from resilience.launcher.zygote import Zygote

RankMode = Literal["infrastructure", "deterministic", "backend"]
LOOK = 0.002  # seconds between looks for a dead worker's record
READY = 5.0  # seconds that the first workers wait for their monitors, which need 0.2 s
LOOK_LIMIT = 1.0  # seconds for a look at workers that are about to be stopped; it needs 0.1
NODES_EVERY = 1.0  # seconds at most between looks at the other nodes while ours runs


class Node:
    """One node's part of the job. Main thread only."""

    def __init__(
        self,
        account: Account,
        handler: Handler,
        monitors: Monitors,
        zygote: Zygote | None,
        signals: Signals,
        gate: Gate,
        patrol: Patrol,
        options: Options,
        limits: Limits,
        policy: Policy,
        spec: WorkerSpec,
        least: int,
        mode: RankMode,
    ) -> None:
        """least: nodes of a cycle; mode: where group ranks come from."""
        self.name = account.node
        self.account = account
        self.handler = handler
        self.monitors = monitors
        self.zygote = zygote
        self.signals = signals
        self.failure: InterruptionRecord | None = None  # the last one that was seen here
        self.restarts_used = 0
        self._gate = gate
        self._patrol = patrol
        self._options = options
        self._limits = limits
        self.policy = policy
        self._spec = spec
        self._mode = mode
        self._budget = JobBudget(
            handler.job_store,
            Budget(
                max_restarts=spec.max_restarts,
                same_limit=options.same_failure_limit,
                startup_restarts=options.startup_restarts,
                stalled_restarts=options.stalled_restarts,
                same_in_window=options.same_failure_in_window,
                window_s=options.failure_window,
                same_exit_code=options.same_failure_exit_code,
            ),
        )
        self._least = least
        self._step = -1  # the highest that any worker here has told
        self._excluded_for: str | None = None  # why this node is to leave
        self._is_zygote_lost = False
        self._soiled = ""  # what cannot be ended here
        self._leaves = ""  # why this node goes while others may stay
        self._had: set[int] = set()  # ranks that this node had in any cycle
        self._forget()

    def _forget(self) -> None:
        """What is known of one cycle."""
        self._records: dict[int, InterruptionRecord] = {}  # by the worker's pid
        self._gone: set[int] = set()
        self._killed = Killed(self._limits.grace)
        self._ranks: dict[int, int] = {}  # of the workers, by local rank
        self._pids: set[int] = set()  # of the workers; what those of the cycle before asked for is over
        self._looked: set[int] = set()  # workers of which it is on record where they were
        self._told: dict[int, bool] = {}  # workers that know they are to stop, and whether they look
        self._requests: list[Request] = []
        self._stop: Verdict | None = None  # what a signal asks for
        self._began_at = time.monotonic()
        self._waiting_since: float | None = None  # some nodes are through, others not
        self._look_at = 0.0

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when a monitor or a signal has something to say."""
        return [*self.monitors.filenos(), self.signals.fileno()]

    @property
    def shortest_limit(self) -> float | None:
        """Seconds of silence after which a rank's monitor ends it, at the earliest."""
        limits = self._limits
        weighed = (limits.step, limits.heartbeat, limits.out_of_section, *limits.sections.values())
        return min((limit.hard for limit in weighed if limit.hard is not None), default=None)

    # -- before a cycle -------------------------------------------------------------------------

    def gate(self) -> Verdict | None:
        """Check this node's health; answers a verdict if it must leave."""
        if self._excluded_for is not None:
            self.handler.exclude(self.name, self._excluded_for)
            return self._leave(f"this node's exclusion was asked for: {self._excluded_for}")
        if self._soiled:
            return self._leave(f"unhealthy: {self._soiled}")
        refusals = self._gate.refusals(self.signals.has_any)
        for refusal in refusals:
            self.account.emit(events.NodeUnhealthy(refusal.check, refusal.detail[:500]))
        if not refusals:
            return None
        return self._leave("unhealthy: " + "; ".join(f"{refusal.check}: {refusal.detail}" for refusal in refusals))

    def closed(self, why: str) -> Verdict:
        """What follows from a rendezvous that takes this node no more. Raises: StoreError."""
        if self.signals.has_any():
            return self._stopped_while_waiting()
        words = self.handler.last_words()
        if not words:
            return self._leave(why)
        with contextlib.suppress(msgspec.DecodeError):
            return cycle.decode(words)  # the others have ended the job
        return Verdict("failed", self.name, exit_code=cycle.FAILED, detail=words)

    def late(self, why: str) -> Verdict:
        """What follows from waiting for a place, or for enough nodes, in vain."""
        self._leaves = why
        return Verdict("failed", self.name, exit_code=cycle.FAILED, detail=why)

    def cut_off(self, why: str) -> Verdict:
        """What follows from the loss of the job's store."""
        why = self.handler.why_cut_off or why
        self.account.emit(events.StoreLost(why[:500]))
        detail = f"the job's store is lost, with the node that hosts it or on the way there: {why}"
        return Verdict("failed", self.name, exit_code=cycle.FAILED, detail=detail)

    def _stopped_while_waiting(self) -> Verdict:
        """A signal came while no workers ran. A node that had a part in the last cycle speaks for all."""
        verdict = self._signalled()
        assert verdict is not None
        if self.handler.formation.rank_of(self.handler.id) is None:
            self._leaves = verdict.detail
        return verdict

    def began(self, group: WorkerGroup) -> None:
        """A cycle begins: read what the job has used of its budget, forget the cycle before."""
        self._forget()
        seats = self.handler.formation.seats
        self._ids = {seat.node: seat.id for seat in seats}
        # By the agents' ids, for two may have been given one name by mistake.
        self._nodes = CycleNodes(
            self.handler.job_store, self.handler.cycle, (seat.id for seat in seats), self.handler.id
        )
        self._counter = f"job/{self._nodes.key}"
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
        self._had.add(worker.global_rank)
        self._pids.add(worker.id)
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
                    self._killed.note(record)
                    if self._records.setdefault(record.pid or -1, record) is record:
                        self.account.console.found(record)
                case messages.Gone(worker_pid):
                    self._gone.add(worker_pid)
                case Lost(monitor_pid, why):
                    self.account.emit_of(self._ranks.get(local_rank), events.MonitorLost(monitor_pid, why))
                case messages.Stopping(worker_pid, is_heard):
                    self._told[worker_pid] = is_heard
                case messages.Looked(worker_pid):
                    self._looked.add(worker_pid)
                case messages.Requested(action, description, _, pid) if pid in self._pids:
                    self.account.emit(events.ControlRequested(action, description, local_rank))
                    self._requests.append(Request(action, description))

    def reap(self, running: Running) -> None:
        """Collect what workers have left behind, and the zygote if it is gone."""
        zygote = 0 if self.zygote is None else self.zygote.pid
        known = {*running.pids(), self.handler.store_pid, zygote}
        known |= {self.monitors.pid(local_rank) or 0 for local_rank in range(self._spec.local_world_size)}
        processes.reap_strangers(known)
        if self.zygote is not None and zygote and self.zygote.why_not and not self._is_zygote_lost:
            self._is_zygote_lost = True
            self.account.emit(events.ZygoteLost(self.zygote.why_not))

    def unkillable(self, pids: Sequence[int]) -> list[int]:
        """Return which of these workers were killed for a hang and will not end."""
        return self._killed.survivors(pids)

    def soil(self, stuck: Sequence[Ended]) -> None:
        """Workers cannot be ended: what they hold (devices, memory, files) is not free, so none starts here again."""
        self._soiled = in_words(stuck)
        self.account.emit(events.NodeUnhealthy("processes", self._soiled[:500]))

    def request(self) -> Verdict | None:
        """What a signal or a rank asks for, once it stands. Raises: StoreError."""
        verdict = self._stop = self._signalled() or self._stop
        if verdict is None:
            self._look_at_devices()
            verdict = control.answer(self._requests, self.name)
            if verdict is None:
                return None
            if verdict.again is not None:  # for the others
                self._excluded_for = verdict.detail
            if verdict.outcome == "preempted":
                self.account.emit(events.StopRequested(verdict.detail, self._options.stop_grace))
        return self.agree(verdict)

    def _look_at_devices(self) -> None:
        """A node whose devices fail leaves, as if one of its ranks had asked for that."""
        refusal = self._patrol.refusal(time.monotonic())
        if refusal is not None:
            self.account.emit(events.NodeUnhealthy(refusal.check, refusal.detail[:500]))
            self._requests.append(Request("ExcludeThisNode", f"{refusal.check}: {refusal.detail}"[:500]))

    def _signalled(self) -> Verdict | None:
        """What the signals since the last look ask for."""
        verdict = None
        for number in self.signals.take():
            detail = f"{signal.Signals(number).name} to the agent of {self.name}"
            self.account.emit(events.StopRequested(detail, self._options.stop_grace))
            verdict = Verdict("preempted", self.name, exit_code=128 + number, detail=detail)
        return verdict

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
        return self._obey(self.handler.end_cycle(cycle.encode(verdict)))

    def _obey(self, text: str) -> Verdict:
        """Read the verdict that stands, and charge the budget unless somebody else has."""
        verdict = cycle.decode(text)
        if verdict.failure is not None:
            self._budget.spend(verdict.failure)
        return verdict

    def after_failure(self, failures: Sequence[Ended]) -> Verdict | None:
        """What follows from workers that failed here; None if the others go on without them. Raises: StoreError."""
        failure = self.record_of(failures[0])
        if failure.exit is not None and failure.exit.signal == "SIGTERM" and self.policy == "any-failed":
            # Nobody here sent it: the scheduler takes this rank's place away, which is no failure. With min-healthy
            # it may have been a Wrapper's monitor, and the others go on.
            detail = f"SIGTERM to rank {failure.rank}"
            self.account.emit(events.StopRequested(detail, self._options.stop_grace))
            return self.agree(Verdict("preempted", self.name, exit_code=128 + signal.SIGTERM, detail=detail))
        self.failure = failure
        text = self.handler.cycle_end()
        if text is not None:
            return self._obey(text)  # where all of them fail at once, one has said so for all
        self._nodes.note("failed")
        what = failure_of(failure, self.handler.cycle, self.name, self._highest_step(), self._ran)
        return self._weigh(self.handler.look(self._counter), what)

    def look(self, is_through: bool) -> Verdict | None:
        """What others did: a verdict of theirs, the end of the last worker, a node that is lost or wants to join.

        is_through: no worker is left here. Raises: StoreError, RendezvousConnectionError."""
        text = self.handler.cycle_end()
        if text is not None:
            return self._obey(text)
        is_new = is_through and self._nodes.note("ended")
        if not is_new and time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + min(NODES_EVERY, self.handler.interval)
        around = self.handler.look(self._counter)
        if around.is_over:
            text = self.handler.cycle_end()  # perhaps by now
            if text is not None:
                return self._obey(text)
            if self.handler.last_words():
                return self.closed("")
            return Verdict("interrupted", self.name, again="membership", detail="the others went on without this node")
        return self._weigh(around)

    def _weigh(self, around: Around, failure: Failure | None = None) -> Verdict | None:
        """What the nodes of this cycle call for. failure: what happened here just now."""
        seen = self._nodes.look(around.lost, around.counter)
        match control.weigh(self.policy, self._least, seen, self._waited(seen), self.apart_limit):
            case "restart":
                return self._after_loss(seen, failure)
            case "completed":
                return self.agree(Verdict("completed", self.name))
            case "premature" if self._nodes.is_waiting:
                more = f" and {seen.waiting - 1} other nodes" if seen.waiting > 1 else ""
                return self.agree(self.premature(f"the workers of {self.name}{more}"))
        if control.takes_newcomers(self.policy, seen) and around.waiting:
            return self.agree(Verdict("interrupted", self.name, again="membership", detail="a node wants to join"))
        return None

    def _waited(self, seen: Nodes) -> float:
        """Seconds for which nodes have been through while others were not, as seen here."""
        if not seen.waiting:
            return 0.0
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        return time.monotonic() - self._waiting_since

    @property
    def apart_limit(self) -> float:
        """Seconds by which workers may finish apart."""
        return self._options.exit_barrier_timeout

    def premature(self, who: str) -> Verdict:
        """The verdict on workers that ended well, and long before the others."""
        detail = (
            f"premature completion: {who} ended well, and others did not within {self.apart_limit:g} s "
            "(--exit-barrier-timeout)"
        )
        return Verdict("failed", self.name, exit_code=cycle.FAILED, detail=detail)

    def _after_loss(self, seen: Nodes, failure: Failure | None) -> Verdict | None:
        """What follows from nodes that failed or are lost, if that is for this agent to say: of what happened here
        before, and the cycle went on with, nothing follows any more."""
        if failure is not None:
            return self._spend(Verdict("failed", self.name, detail=failure.what, rank=failure.rank), failure)
        if not seen.lost:
            return None  # the agent where it failed knows what, and says it at once
        lost = self._names(seen.lost)
        what = f"node {', '.join(lost)} is lost"
        failure = Failure(self.handler.cycle, f"lost {lost[0]}", what, lost[0], -1, self._highest_step(), ran=self._ran)
        return self._spend(Verdict("failed", self.name, detail=what), failure)

    def _names(self, ids: frozenset[str]) -> list[str]:
        return sorted(node for node, id in self._ids.items() if id in ids)

    @property
    def _ran(self) -> float:
        """Seconds for which this cycle has run."""
        return time.monotonic() - self._began_at

    def _highest_step(self) -> int:
        """The highest step that a worker here has told, in this attempt, by records or by its present signs."""
        shown = signs.read_of(self.account.folder, self.name, self._had)
        steps = [each.step for each in shown if each.origin.attempt == self.account.origin.attempt]
        steps += [record.step for record in self._records.values()]
        self._step = max([self._step, *(step for step in steps if step is not None)])
        return self._step

    def _spend(self, verdict: Verdict, failure: Failure) -> Verdict:
        """Ask the job's budget what a failure brings about; let the answer stand."""
        answer = self._budget.decide(failure)
        verdict = msgspec.structs.replace(verdict, failure=failure)
        if answer.is_restart:
            verdict = msgspec.structs.replace(verdict, again="failure")
        else:
            detail = f"{verdict.detail}; {answer.why}" if answer.why not in verdict.detail else verdict.detail
            verdict = msgspec.structs.replace(verdict, outcome="exhausted", exit_code=answer.exit_code, detail=detail)
        standing = self.agree(verdict)
        if standing == verdict:
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
        """Return what the job failed from, as lines of a table; none if the store is lost."""
        try:
            return table(self._budget.history())
        except StoreError:
            return []

    def look_at_workers(self, running: Running) -> list[Ended]:
        """A rank hung: before the others are stopped, have it put on record where they are, which tells who waited
        for whom. Answers who has left meanwhile."""
        self.monitors.look()
        ended: list[Ended] = []
        deadline = time.monotonic() + LOOK_LIMIT
        while not self._looked | self._gone >= set(running.pids()) and time.monotonic() < deadline:
            time.sleep(LOOK)
            self.hear()
            ended += running.collect()
        return ended

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

    def stop_limit(self, verdict: Verdict, limit: float) -> float:
        """Return how long workers may take to end, in seconds, `limit` at most: where the others go on without this
        node no worker of the old cycle may be at work beside theirs."""
        left = self.handler.time_left
        if left is not None:
            return min(left, limit)
        with contextlib.suppress(StoreError):
            if verdict.failure is not None and self.handler.is_taken_for_lost():
                return 0.0
        return limit

    def _leave(self, why: str) -> Verdict:
        self.account.emit(events.NodeExcluded(why))
        self._leaves = why
        return Verdict("excluded", self.name, exit_code=cycle.EXCLUDED, detail=why)

    def over(self, verdict: Verdict) -> None:
        """The job is over for this node, and for all of them unless only this one leaves. Waits for the others
        where they need this node's store."""
        if not self._leaves:
            with contextlib.suppress(RendezvousConnectionError):
                self.handler.set_closed(cycle.encode(verdict))
        self.handler.leave(self._leaves)


def exit_of(ended: Ended) -> Exit:
    """Return a worker's end in the words of records."""
    return Exit(code=ended.code) if ended.code >= 0 else Exit(signal=ended.how)
