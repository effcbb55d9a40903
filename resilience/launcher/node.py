"""What one node's agent has at hand, and what it does with it when something happens.

Every question that ends a cycle is asked here: a failure, a request, another agent's verdict, the end of
the last worker, a node that wants to join, one that is lost. What workers and monitors have told stands in
`witnesses`, decisions are `core`'s; one verdict a cycle
stands in the rendezvous, and whoever comes second obeys it. Of a failure, only the agent of its node
decides, which knows it, or whoever notices that this agent is lost."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.utils import macros

from resilience.adapters import processes
from resilience.core import control, cycle, events
from resilience.core.attribution import InterruptionRecord
from resilience.core.budget import Budget, Failure, table
from resilience.core.control import Nodes, Policy, Request
from resilience.core.cycle import Verdict
from resilience.core.silences import Rule
from resilience.core.watch import Limits
from resilience.errors import DecodeError, StoreError
from resilience.launcher import program
from resilience.launcher.budget import JobBudget, failure_of
from resilience.launcher.cycle_nodes import CycleNodes
from resilience.launcher.stopping import Stopping
from resilience.launcher.stuck import in_words
from resilience.launcher.witnesses import LOOK, Witnesses

if TYPE_CHECKING:
    from resilience.core.gathering import Around
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
NODES_EVERY = 1.0  # seconds at most between looks at the other nodes while ours runs


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
        least: int,
        mode: RankMode,
    ) -> None:
        """least: nodes of a cycle; mode: where group ranks come from."""
        self.name = account.node
        self.account = account
        self.handler = handler
        self.monitors = monitors
        self.zygote = zygote
        self.drain = drain
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
                stalled_restarts=options.stalled_restarts,
                same_in_window=options.same_failure_in_window,
                window_s=options.failure_window,
                same_exit_code=options.same_failure_exit_code,
            ),
        )
        self._least = least
        self._excluded_for: str | None = None  # why this node is to leave
        self._is_zygote_lost = False
        self._warned: set[str] = set()  # checks whose last warning was reported
        self._soiled = ""  # what cannot be ended here
        self._leaves = ""  # why this node goes while others may stay
        self.witnesses = Witnesses(account, monitors, limits)
        self.stopping = Stopping(
            account, handler, monitors, signals, self.witnesses, least, options.on_sigterm, options.stop_grace
        )
        self._forget()

    def _forget(self) -> None:
        """What is known of one cycle."""
        self.witnesses.forget()
        self._began_at = time.monotonic()
        self._waiting_since: float | None = None  # some nodes are through, others not
        self._look_at = 0.0

    @property
    def has_left(self) -> bool:
        """Whether this node goes while others may stay."""
        return bool(self._leaves)

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when a monitor or a signal has something to say."""
        drain = [] if self.drain is None else self.drain.filenos()
        return [*self.monitors.filenos(), self.signals.fileno(), *drain]

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
        if self._excluded_for is not None:
            self.handler.exclude(self.name, self._excluded_for)
            return self._leave(f"this node's exclusion was asked for: {self._excluded_for}")
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
        words = self.handler.last_words()
        if not words:
            return self._leave(why)
        with contextlib.suppress(DecodeError):
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
        """A signal came while no workers ran, or the cycle ended with another verdict. A node that had a part in the
        last cycle and does not leave speaks for all. Raises: StoreError."""
        verdict = self.stopping.asked()
        assert verdict is not None
        if verdict.again is not None:
            self.account.emit(events.NodeExcluded(verdict.detail))
            self._leaves = verdict.detail
            if not self.handler.is_host:
                self.handler.leave(verdict.detail)  # now: the others form the next cycle
        return msgspec.structs.replace(verdict, again=None)

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
            self.witnesses.hear()
            if time.monotonic() > deadline:
                break  # they run unmonitored until theirs is there
            time.sleep(LOOK)

    # -- what happens ---------------------------------------------------------------------------

    def reap(self, running: Running) -> None:
        """Collect what workers have left behind, and the zygote if it is gone."""
        zygote = 0 if self.zygote is None else self.zygote.pid
        known = {*running.pids(), self.handler.store_pid, zygote, 0 if self.drain is None else self.drain.pid}
        known |= {self.monitors.pid(local_rank) or 0 for local_rank in range(self._spec.local_world_size)}
        processes.reap_strangers(known)
        if self.drain is not None:
            self.drain.hear()
        if self.zygote is not None and zygote and self.zygote.why_not and not self._is_zygote_lost:
            self._is_zygote_lost = True
            self.account.emit(events.ZygoteLost(self.zygote.why_not))

    def soil(self, stuck: Sequence[Ended]) -> None:
        """Workers cannot be ended: what they hold (devices, memory, files) is not free, so none starts here again."""
        self._soiled = in_words(stuck)
        self.account.emit(events.NodeUnhealthy("processes", self._soiled[:500]))

    def request(self) -> Verdict | None:
        """What a signal or a rank asks for, once it stands. Raises: StoreError."""
        verdict = self.stopping.asked()
        if verdict is None:
            self._look_at_devices()
            verdict = control.answer(self.witnesses.requests, self.name)
            if verdict is None:
                self.stopping.end_terminated_workers()
                return None
            if verdict.again is not None:  # for the others
                self._excluded_for = verdict.detail
        return self.agree(verdict)

    def _look_at_devices(self) -> None:
        """A node whose devices fail leaves, as if one of its ranks had asked for that."""
        refusal = self._patrol.refusal(time.monotonic())
        if refusal is not None:
            self.account.emit(events.NodeUnhealthy(refusal.check, refusal.detail[:500]))
            self.witnesses.requests.append(Request("ExcludeThisNode", f"{refusal.check}: {refusal.detail}"[:500]))

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
        failure = self.witnesses.record_of(failures[0])
        self.failure = failure
        text = self.handler.cycle_end()
        if text is not None:
            return self._obey(text)  # where all of them fail at once, one has said so for all
        self._nodes.note("failed")
        what = failure_of(
            failure,
            self.handler.cycle,
            self.name,
            self.witnesses.highest_step(),
            self._ran,
            self._why_not_started(failures[0]),
        )
        return self._weigh(self.handler.look(self._counter), what)

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
        if control.is_premature(self.policy, running.apart, self._options.exit_barrier_timeout):
            done = sorted(ended.rank for ended in running.ended if ended.code == 0)
            return self.agree(self._premature(f"rank {', '.join(map(str, done))}"))
        text = self.handler.cycle_end()
        if text is not None:
            return self._obey(text)
        is_new = not running.living and self._nodes.note("ended")
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
        match control.weigh(self.policy, self._least, seen, self._waited(seen), self._options.exit_barrier_timeout):
            case "restart":
                return self._after_loss(seen, failure)
            case "completed":
                return self.agree(Verdict("completed", self.name))
            case "premature" if self._nodes.is_waiting:
                more = f" and {seen.waiting - 1} other nodes" if seen.waiting > 1 else ""
                return self.agree(self._premature(f"the workers of {self.name}{more}"))
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

    def _premature(self, who: str) -> Verdict:
        """The verdict on workers that ended well, and long before the others."""
        detail = (
            f"premature completion: {who} ended well, and others did not within "
            f"{self._options.exit_barrier_timeout:g} s (--exit-barrier-timeout)"
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
        failure = Failure(
            self.handler.cycle, f"lost {lost[0]}", what, lost[0], -1, self.witnesses.highest_step(), ran=self._ran
        )
        return self._spend(Verdict("failed", self.name, detail=what), failure)

    def _names(self, ids: frozenset[str]) -> list[str]:
        return sorted(node for node, id in self._ids.items() if id in ids)

    @property
    def _ran(self) -> float:
        """Seconds for which this cycle has run."""
        return time.monotonic() - self._began_at

    def _spend(self, verdict: Verdict, failure: Failure) -> Verdict:
        """Ask the job's budget what a failure brings about; let the answer stand."""
        answer = self._budget.decide(failure)
        verdict = msgspec.structs.replace(verdict, failure=failure)
        if answer.is_restart:
            verdict = msgspec.structs.replace(verdict, again="failure")
        else:
            detail = answer.why if verdict.detail in answer.why else f"{verdict.detail}; {answer.why}"
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

    def let_finish(self, running: Running, verdict: Verdict) -> list[Ended]:
        """Give workers that look for it the time to write a checkpoint and leave; answers who has left.

        Ends at once if none looks, after the grace, and when a person asks again (SIGINT, SIGQUIT): schedulers send
        SIGTERM twice as it is."""
        self.witnesses.ask_to_stop()
        ended: list[Ended] = []
        is_heard = False  # by any: then the others may come to it as well
        deadline = time.monotonic() + self._options.stop_grace
        while running.living and time.monotonic() < deadline:
            if self._is_hurried(verdict):
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
        """Return True if a person wants the end of workers that were asked to stop, and asks again."""
        return verdict.outcome == "preempted" and self._is_hurried(verdict)

    def _is_hurried(self, verdict: Verdict) -> bool:
        """Return True if a person asks again. Where the others go on, a signal is kept: it is for this node alone."""
        return verdict.again is None and bool({signal.SIGINT, signal.SIGQUIT} & set(self.signals.take()))

    def stop_limit(self, verdict: Verdict, limit: float) -> float:
        """Return how long workers may take to end, in seconds: `limit`, or --term-timeout if a signal stops the job;
        less if the others go on without this node, for no worker of the old cycle may be at work beside theirs."""
        if verdict.outcome == "preempted" and self._options.term_timeout is not None:
            limit = self._options.term_timeout
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
