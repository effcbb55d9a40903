"""What must one node's agent do about events in its cycle?  One verdict per cycle, one store operation at a time.

This module handles all events that may end a cycle: a failure, a request, a signal, another agent's verdict, the end of
the last worker, a node that wants to join, a lost node. The first verdict counts, and all agents of the cycle obey it.
The agent of the failed node decides what follows from a failure; if that agent is lost, an agent that notices the loss
decides. `core.control` applies the restart policy, `core.budget` grants restarts, `core.rendezvous` forms cycles.
`launcher.cycle_supervisor` handles processes, monitors and the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec

from resilience.core import control, cycle
from resilience.core.agent_protocol import Emit, HighestStep, IsInterrupted, NodeProtocol, Protocol, ReadClock, Seconds
from resilience.core.budget import Budget, Failure
from resilience.core.control import Nodes, Policy, Request
from resilience.core.cycle import CycleDecision
from resilience.core.cycle_nodes import CycleNodes
from resilience.core.job_budget import JobBudget
from resilience.core.membership import FIRST, Around, Membership, NodeSeat
from resilience.core.rendezvous import ASK_EVERY, Refusal, Rendezvous
from resilience.core.restart import CompareSet
from resilience.core.shared_list import SharedList
from resilience.core.stopping import Asked, Mode, on_signal
from resilience.errors import DecodeError
from resilience.facts import events
from resilience.facts.in_words import count


class Rules(msgspec.Struct, frozen=True):
    """The settings of a job. policy: what a failed worker means; budget: of restarts; apart: seconds by which nodes and
    workers may finish apart (--exit-barrier-timeout), None for no limit; mode: `--on-sigterm`; grace: seconds for a
    checkpoint once the job is asked to stop."""

    policy: Policy
    budget: Budget
    apart: Seconds | None = None
    mode: Mode = "leave"
    grace: Seconds = 30.0


class WorkerStates(msgspec.Struct, frozen=True):
    """The state of an agent's own workers. are_living: any worker lives; apart: seconds since the first worker finished
    while others still run; done: ranks of the workers that succeeded."""

    are_living: bool
    apart: Seconds = 0.0
    done: tuple[int, ...] = ()


class Supervision:
    """One agent's part in the life of a job. At most one of its protocols runs at a time."""

    def __init__(self, rendezvous: Rendezvous, rules: Rules, hosts_store: bool) -> None:
        """hosts_store: the job's store ends with this node."""
        self.name = rendezvous.node
        self.rules = rules
        self.budget = JobBudget(rules.budget)
        self.restarts_used = 0
        self.leaves = ""  # why this node leaves while others may stay
        self.excluded_for: str | None = None  # why this node was asked to leave
        self.stop: CycleDecision | None = None  # the verdict that signals ask for
        self.is_job_over = False  # the rendezvous is closed, so the others start no workers without this node
        self._rendezvous = rendezvous
        self._hosts_store = hosts_store
        self._forget(())

    def _forget(self, seats: Sequence[tuple[str, str]]) -> None:
        """Reset the state of the cycle. seats: the agents' ids and their nodes in the new cycle."""
        # Keyed by id, because two nodes may have the same name by mistake.
        self._ids = dict(seats)
        self._nodes = CycleNodes(self._rendezvous.cycle, self._ids, self._rendezvous.id)
        self._waiting_since: Seconds | None = None  # since when some nodes have finished and others not
        self._look_at: Seconds | None = None
        self._looks = 0
        self._began_at: Seconds = 0.0

    # -- before a cycle, and without one --------------------------------------------------------

    def join(self, seat: NodeSeat) -> NodeProtocol[Membership | Refusal]:
        """Arrive and wait until a cycle has a place for this agent. Raises: ConfigurationError for wrong ranks."""
        last = self._rendezvous.cycle
        joining: NodeProtocol[Membership | Refusal] = self._rendezvous.join_if_continued(seat, self.why_not_continued)
        result = yield from joining
        yield from self._read_missed(last, self._rendezvous.cycle - 1)
        return result

    def _read_missed(self, last: int, former: int) -> Protocol[None]:
        """Read the failures of cycles in which this agent had no part: nobody knows when they were. last: the last
        cycle that it took part in; former: the last one of the job."""
        if last < former:
            yield from self.budget.open()

    def began(self) -> Protocol[CycleDecision | None]:
        """Begin a cycle. Return its verdict if it is already over, for example because this agent was stopped for a
        while: its workers must not start besides those of the next cycle. Return None if they may start."""
        yield from self._nodes.forget()
        self._forget([(seat.id, seat.node) for seat in self._rendezvous.membership.seats])
        self._began_at = yield ReadClock()
        yield from self._nodes.open()
        self.restarts_used = yield from self.budget.used()
        return (yield from self.standing())

    def excluded(self) -> NodeProtocol[CycleDecision | None]:
        """Exclude this node if that was requested. Return the verdict, None if it was not requested."""
        if self.excluded_for is None:
            return None
        yield from self._rendezvous.exclude(self.name, self.excluded_for)
        return (yield from self.leave(f"this node's exclusion was asked for: {self.excluded_for}"))

    def stopped_while_waiting(self) -> NodeProtocol[CycleDecision]:
        """Return the verdict for signals that came while no workers ran, or while the cycle ended with another verdict.
        A node of the last cycle that does not leave ends the job, unless the job has already ended."""
        verdict = self.stop
        assert verdict is not None
        if verdict.again is not None:
            yield Emit(events.NodeExcluded(verdict.detail))
            self.leaves = verdict.detail
            return msgspec.structs.replace(verdict, again=None)
        end = yield from self._end_job(verdict)
        return verdict if end.outcome == verdict.outcome else end  # has the exit status of this agent's own signal

    def closed(self, why: str) -> NodeProtocol[CycleDecision]:
        """Return the verdict if the rendezvous no longer accepts this node. why: its reason."""
        reason = (yield from self._rendezvous.newest()).closed
        return self._end_of_job(reason) if reason else (yield from self.leave(why))

    def _end_job(self, verdict: CycleDecision) -> Protocol[CycleDecision]:
        """End the job for all nodes, unless it has ended. Return the verdict that it ends with."""
        return self._end_of_job((yield from self._rendezvous.close(cycle.encode(verdict))))

    def _end_of_job(self, reason: str) -> CycleDecision:
        """Return the verdict with which the rendezvous was closed."""
        self.is_job_over = True
        with contextlib.suppress(DecodeError):
            return cycle.decode(reason)
        return CycleDecision("failed", self.name, exit_code=cycle.FAILED, detail=reason)

    def late(self, why: str) -> Protocol[CycleDecision]:
        """Return the verdict if this node found no place, or not enough nodes, in time. If it hosts the store, and the
        job cannot go on without it, the job ends for all nodes: they would wait in a store that no cycle uses."""
        verdict = CycleDecision("failed", self.name, exit_code=cycle.FAILED, detail=why)
        if self._hosts_store:
            reason = yield from self._rendezvous.close_if_stuck(cycle.encode(verdict))
            if reason:
                return self._end_of_job(reason)
        self.leaves = why
        return verdict

    def cut_off(self, store: str, why: str) -> CycleDecision:
        """Return the verdict of a node that lost the job's store. Other nodes may still reach it, so only this node
        leaves, unless it hosts the store. store: its address; why: in words."""
        if self._hosts_store:
            detail = f"the job's store at {store}, which node {self.name} hosts, is lost: {why}"
        else:
            self.leaves = detail = f"node {self.name} could not reach the job's store at {store}: {why}"
        return CycleDecision("failed", self.name, exit_code=cycle.FAILED, detail=detail)

    def stopped_without_store(self, number: int, name: str, lost: CycleDecision) -> CycleDecision:
        """Return the verdict of a node whose agent got a signal and lost the job's store, so that it cannot tell the
        others. lost: the verdict without the signal."""
        detail = f"{name} to the agent of {self.name}; {lost.detail}"
        return CycleDecision("preempted", self.name, exit_code=128 + number, detail=detail)

    def leave(self, why: str) -> NodeProtocol[CycleDecision]:
        """Return the verdict of a node that leaves while others may stay."""
        yield Emit(events.NodeExcluded(why))
        self.leaves = why
        return CycleDecision("excluded", self.name, exit_code=cycle.EXCLUDED, detail=why)

    def stop_others(self, number: int, name: str) -> Protocol[CycleDecision]:
        """Stop the job that continues without this node, whose agent has got a signal: the others need its store."""
        detail = f"{name} to the agent of {self.name}, which hosts the job's store"
        return self._end_job(CycleDecision("preempted", self.name, exit_code=128 + number, detail=detail))

    def over(self, verdict: CycleDecision) -> Protocol[None]:
        """End the job for all nodes, unless only this node leaves."""
        if not self.leaves:
            yield from self._rendezvous.close(cycle.encode(verdict))

    def ended_by_error(self, error: str) -> Protocol[CycleDecision]:
        """End the job for all nodes because this agent itself failed, unless the job has already ended. Return the
        verdict that it ends with. An agent that waits for a place in a running job only leaves."""
        verdict = CycleDecision("failed", self.name, exit_code=cycle.FAILED, detail=error)
        if self._rendezvous.membership.rank_of(self._rendezvous.id) is not None:
            standing = yield from self.agree(verdict)
            if standing.again is None:
                return standing
        elif (yield from self._rendezvous.newest()).cycle != FIRST:
            self.leaves = error
        return verdict if self.leaves else (yield from self._end_job(verdict))

    def why_not_continued(self, former: int) -> NodeProtocol[str]:
        """Return why the job ends with the former cycle, empty if it continues. A cycle without a verdict has lost all
        its agents, or they were declared lost and came back. This is charged as a failure, unless all of them left by
        themselves."""
        yield from self._read_missed(self._rendezvous.cycle, former)
        verdict = yield from self.standing(former)
        if verdict is None:
            known = self._rendezvous.arrivals
            seats = [seat for seat in known.last.seats if seat.id not in known.left]
            lost = [seat.node for seat in seats if seat.id not in known.arrived] or [seat.node for seat in seats]
            if lost:
                verdict = yield from self._spend(*self._loss(lost, former, -1, 0.0))
            else:
                verdict = yield from self._agree_on_leaving([seat.node for seat in known.last.seats], former)
        return "" if verdict.again is not None else cycle.encode(verdict)

    # -- signals and requests -------------------------------------------------------------------

    def signalled(self, number: int, name: str) -> NodeProtocol[None]:
        """Set `stop`, the verdict that a signal to this agent asks for. A leaving node may still be asked to stop the
        job."""
        if self.stop is not None and self.stop.again is None:
            return
        detail = f"{name} to the agent of {self.name}"
        leaves = (yield from self._mode(name)) == "leave"
        if leaves:
            detail += ", which leaves"
        yield Emit(events.StopRequested(detail, self.rules.grace, leaves))
        again: events.CycleReason | None = "membership" if leaves else None
        self.stop = CycleDecision("preempted", self.name, again, exit_code=128 + number, detail=detail)

    def _mode(self, name: str) -> Protocol[Mode]:
        """Return whether this node leaves or the job stops. An agent that leaves a cycle appends itself to a list. So
        each agent knows those that leave before it, even if they are signalled at the same time."""
        rendezvous = self._rendezvous
        if rendezvous.membership.rank_of(rendezvous.id) is None:  # it waits for a place
            newest = yield from rendezvous.newest()
            is_needed = newest.cycle == FIRST or newest.rank_of(rendezvous.id) is not None  # it does not know yet
            return "stop" if self._hosts_store and is_needed else "leave"
        others = yield from rendezvous.others(())
        asked = Asked(name, self.rules.mode, self._hosts_store, others, rendezvous.terms.least)
        if on_signal(asked) == "stop":
            return "stop"
        return on_signal(msgspec.structs.replace(asked, others=(yield from self._others_after_leaving())))

    def _others_after_leaving(self) -> Protocol[int]:
        """Register this agent as leaving its cycle. Return how many nodes could take part in the next one."""
        rendezvous = self._rendezvous
        entries = SharedList(f"job/leaving/{rendezvous.cycle}")
        leaving: list[str] = []

        def is_listed() -> Protocol[bool]:
            leaving.extend((yield from entries.read()))
            return rendezvous.id in leaving

        yield from entries.append(rendezvous.id, is_listed)
        return (yield from rendezvous.others(leaving[: leaving.index(rendezvous.id)]))

    def cannot_start(self, why: str, is_of_node: bool) -> NodeProtocol[CycleDecision]:
        """Return the verdict if the workers of this node cannot be started. is_of_node: this node lacks something, so
        it leaves if the others are enough. Otherwise the job fails, because the others would not succeed either."""
        failed = CycleDecision("failed", self.name, exit_code=cycle.FAILED, detail=why)
        if not is_of_node:
            return (yield from self.agree(failed))
        if (yield from self._others_after_leaving()) >= self._rendezvous.terms.least:
            yield Emit(events.NodeUnhealthy("workers", why[:500]))
            self.excluded_for = why
            detail = f"node {self.name} leaves: {why}"
            return (yield from self.agree(CycleDecision("interrupted", self.name, again="request", detail=detail)))
        return failed

    def requested(self, requests: Sequence[Request]) -> Protocol[CycleDecision | None]:
        """Return the verdict after signals to this agent and its workers' requests, None if there are none."""
        verdict = self.stop
        if verdict is None:
            verdict = control.answer(requests, self.name)
            if verdict is None:
                return None
            if verdict.again is not None:  # another cycle for the other nodes
                self.excluded_for = verdict.detail
        return (yield from self.agree(verdict))

    # -- verdicts -------------------------------------------------------------------------------

    def agree(self, verdict: CycleDecision) -> Protocol[CycleDecision]:
        """Propose a verdict for all agents of this cycle. Return the first verdict, which counts."""
        return (yield from self._obey((yield from self._rendezvous.end_cycle(cycle.encode(verdict)))))

    def standing(self, number: int | None = None) -> Protocol[CycleDecision | None]:
        """Return the verdict on a cycle, None if there is none yet. number: of the cycle, by default this agent's."""
        text = yield from self._rendezvous.cycle_end(number)
        return None if text is None else (yield from self._obey(text))

    def cause_of_cycle(self) -> Protocol[CycleDecision | None]:
        """Return the verdict that led to this agent's cycle, None if there is none. It was charged to the budget."""
        text = yield from self._rendezvous.cycle_end(self._rendezvous.cycle - 1)
        return None if text is None else cycle.decode(text)

    def _obey(self, text: str) -> Protocol[CycleDecision]:
        """Read the verdict and charge the budget, unless another agent has. A verdict that ends the job ends it at
        once, because an agent that waits for the next cycle may end it at the same time."""
        verdict = cycle.decode(text)
        if verdict.failure is not None:
            yield from self.budget.spend(verdict.failure)
        return (yield from self._end_job(verdict)) if verdict.again is None else verdict

    def ran(self) -> Protocol[Seconds]:
        """Return how many seconds this cycle has run."""
        now: Seconds = yield ReadClock()
        return now - self._began_at

    def failed(self, failure: Failure) -> NodeProtocol[CycleDecision | None]:
        """Return the verdict after workers of this node failed, None if the others continue without them."""
        yield from self._nodes.note("failed")
        around = yield from self._rendezvous.look(self._nodes.key)
        return (yield from self._weigh(around, failure))

    def look(self, workers: WorkerStates) -> NodeProtocol[CycleDecision | None]:
        """Return the verdict after events elsewhere: another agent's verdict, the end of the last worker, a node that
        is lost or wants to join. Return None if the cycle continues."""
        rules = self.rules
        if workers.done and control.is_premature(rules.policy, workers.apart, rules.apart):
            return (yield from self.agree(self._premature(f"rank {', '.join(map(str, workers.done))}")))
        now = yield ReadClock()
        is_time = self._look_at is None or now >= self._look_at
        if (yield from self._rendezvous.is_end_told()) or (is_time and self._looks % ASK_EVERY == 0):
            standing = yield from self.standing()
            if standing is not None:
                return standing
        is_new = not workers.are_living and (yield from self._nodes.note("ended"))
        if not is_new and not is_time:
            return None
        self._look_at, self._looks = now + self._rendezvous.terms.interval, self._looks + 1
        around = yield from self._rendezvous.look(self._nodes.key)
        return (yield from (self._went_on() if around.is_over else self._weigh(around)))

    def _went_on(self) -> NodeProtocol[CycleDecision | None]:
        """Return the verdict if there is a next cycle, or the rendezvous is closed, or a cycle forms without this
        agent, although no verdict was found."""
        standing = yield from self.standing()  # there may be a verdict by now
        if standing is not None or (yield IsInterrupted()):
            return standing
        if (yield from self._rendezvous.newest()).closed:
            return (yield from self.closed(""))
        return CycleDecision(
            "interrupted", self.name, again="membership", detail="the others went on without this node"
        )

    def _weigh(self, around: Around, failure: Failure | None = None) -> NodeProtocol[CycleDecision | None]:
        """Return the verdict that the nodes of this cycle call for. failure: a failure on this node just now."""
        rules = self.rules
        nodes = yield from self._nodes.look(around.lost, around.counter)
        waited = yield from self._waited(nodes)
        match control.weigh(rules.policy, self._rendezvous.terms.least, nodes, waited, rules.apart):
            case "restart":
                return (yield from self._after_loss(nodes, failure))
            case "completed":
                return (yield from self.agree(CycleDecision("completed", self.name)))
            case "premature" if self._nodes.is_waiting:
                more = f" and {count(nodes.waiting - 1, 'other node')}" if nodes.waiting > 1 else ""
                return (yield from self.agree(self._premature(f"the workers of {self.name}{more}")))
        if control.takes_newcomers(rules.policy, nodes) and around.waiting:
            verdict = CycleDecision("interrupted", self.name, again="membership", detail="a node wants to join")
            return (yield from self.agree(verdict))
        return None

    def _waited(self, nodes: Nodes) -> Protocol[Seconds]:
        """Return how many seconds some nodes have been finished while others were not, as observed here."""
        if not nodes.waiting:
            return 0.0
        now: Seconds = yield ReadClock()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since

    def _premature(self, workers: str) -> CycleDecision:
        """Return the verdict on workers that succeeded long before the others."""
        assert self.rules.apart is not None  # without a limit none is premature
        detail = (
            f"premature completion: {workers} ended well, and others did not within {self.rules.apart:g} s "
            "(--exit-barrier-timeout)"
        )
        return CycleDecision("failed", self.name, exit_code=cycle.FAILED, detail=detail)

    def _after_loss(self, nodes: Nodes, failure: Failure | None) -> NodeProtocol[CycleDecision | None]:
        """Return the verdict on failed or lost nodes, None if another agent decides. An earlier failure on this node
        that the cycle survived no longer counts."""
        if failure is not None:
            verdict = CycleDecision("failed", self.name, detail=failure.what, rank=failure.rank)
            return (yield from self._spend(verdict, failure))
        if not nodes.lost:
            return None  # the agent of the failed node knows the failure and decides at once
        left = self._rendezvous.arrivals.left
        lost = [self._ids[id] for id in nodes.lost - left]
        if not lost:
            return (yield from self._agree_on_leaving([self._ids[id] for id in nodes.lost], self._rendezvous.cycle))
        step, ran = (yield HighestStep()), (yield from self.ran())
        return (yield from self._spend(*self._loss(lost, self._rendezvous.cycle, step, ran)))

    def _agree_on_leaving(self, nodes: Sequence[str], number: int) -> Protocol[CycleDecision]:
        """Propose a next cycle without nodes that left a cycle by themselves, just as it was formed. This is no
        failure."""
        detail = f"node {', '.join(sorted(nodes))} has left"
        verdict = CycleDecision("interrupted", self.name, again="membership", detail=detail)
        text = yield CompareSet(f"end/{number}", cycle.encode(verdict))
        return (yield from self._obey(text))

    def _loss(self, nodes: Sequence[str], number: int, step: int, ran: Seconds) -> tuple[CycleDecision, Failure]:
        """Return the loss of nodes in a cycle as a verdict and as a failure for the budget."""
        names = sorted(nodes)
        detail = f"node {', '.join(names)} is lost"
        failure = Failure(number, f"lost {names[0]}", detail, names[0], -1, step, ran=ran, kind="lost node")
        return CycleDecision("failed", self.name, detail=detail), failure

    def _spend(self, verdict: CycleDecision, failure: Failure) -> NodeProtocol[CycleDecision]:
        """Ask the job's budget what follows from the failure of a cycle. Propose the answer as the cycle's verdict."""
        answer = yield from self.budget.decide(failure)
        verdict = msgspec.structs.replace(verdict, failure=failure)
        if answer.is_restart:
            verdict = msgspec.structs.replace(verdict, again="failure")
        else:
            detail = answer.why if verdict.detail in answer.why else f"{verdict.detail}; {answer.why}"
            verdict = msgspec.structs.replace(verdict, outcome="exhausted", exit_code=answer.exit_code, detail=detail)
        text = yield CompareSet(f"end/{failure.cycle}", cycle.encode(verdict))
        standing = yield from self._obey(text)
        if standing == verdict:
            yield Emit(
                events.RestartDecided(
                    "restart" if answer.is_restart else "stop",
                    failure.fingerprint,
                    answer.why,
                    answer.used,
                    answer.left,
                    answer.same_in_a_row,
                    failure.node if failure.kind == "lost node" else None,
                ),
                failure.cycle,
            )
        return standing
