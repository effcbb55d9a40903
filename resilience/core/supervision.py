"""What follows for one node's agent from what happens in its cycle?  One verdict a cycle, one operation at a time.

Each question that ends a cycle is asked here: a failure, a request, a signal, another agent's verdict, the end of the
last worker, a node that wants to join, one that is lost. The first verdict stands in the store, and all agents of the
cycle obey it. Only the agent of its node decides about a failure, or an agent that notices that this agent is lost.
Which nodes a verdict needs is `core.control`, whether a restart is granted `core.budget`, who meets whom
`core.rendezvous`. Processes, monitors and the terminal are `launcher.node`'s."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec

from resilience.core import control, cycle, events
from resilience.core.agent_protocol import Emit, HighestStep, IsInterrupted, Now, Protocol, Seconds
from resilience.core.budget import Budget, Failure
from resilience.core.control import Nodes, Policy, Request
from resilience.core.cycle import Verdict
from resilience.core.cycle_nodes import CycleNodes
from resilience.core.gathering import Around
from resilience.core.job_budget import JobBudget
from resilience.core.rendezvous import ASK_EVERY, Rendezvous
from resilience.core.restart import CompareSet
from resilience.core.shared_list import SharedList
from resilience.core.stopping import Asked, Mode, on_signal
from resilience.errors import DecodeError


class Rules(msgspec.Struct, frozen=True):
    """What is configured for a job. policy: what a failed worker means; budget: restarts; apart: seconds by which
    nodes, and workers, may finish apart (--exit-barrier-timeout); mode: `--on-sigterm`; grace: seconds for a
    checkpoint once the job is asked to stop."""

    policy: Policy
    budget: Budget
    apart: Seconds = 300.0
    mode: Mode = "leave"
    grace: Seconds = 30.0


class Workers(msgspec.Struct, frozen=True):
    """What an agent sees of its own workers. are_living: any of them; apart: seconds for which some of them have been
    through while others are not; done: ranks of those that are through, and well."""

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
        self.leaves = ""  # why this node goes while others may stay
        self.excluded_for: str | None = None  # why this node was asked to leave
        self.stop: Verdict | None = None  # what signals ask for
        self._rendezvous = rendezvous
        rendezvous.why_not_continued = self._why_not_continued
        self._hosts_store = hosts_store
        self._forget(())

    def _forget(self, seats: Sequence[tuple[str, str]]) -> None:
        """A cycle begins. seats: its agents' ids and their nodes."""
        # By the agents' ids, for two may have been given one name by mistake.
        self._ids = dict(seats)
        self._nodes = CycleNodes(self._rendezvous.cycle, self._ids, self._rendezvous.id)
        self._waiting_since: Seconds | None = None  # some nodes are through, others not
        self._look_at: Seconds | None = None
        self._looks = 0
        self._began_at: Seconds = 0.0

    # -- before a cycle, and without one --------------------------------------------------------

    def began(self) -> Protocol[Verdict | None]:
        """A cycle begins. Return its verdict if it is over already, as after this agent was stopped for a while: its
        workers must not start beside those of the next cycle. None if they may start."""
        yield from self._nodes.forget()
        self._forget([(seat.id, seat.node) for seat in self._rendezvous.formation.seats])
        self._began_at = yield Now()
        yield from self._nodes.open()
        self.restarts_used = yield from self.budget.used()
        return (yield from self.standing())

    def excluded(self) -> Protocol[Verdict | None]:
        """Return the verdict for a node that was asked to leave, None if it was not. It takes part no more."""
        if self.excluded_for is None:
            return None
        yield from self._rendezvous.exclude(self.name, self.excluded_for)
        return (yield from self.leave(f"this node's exclusion was asked for: {self.excluded_for}"))

    def stopped_while_waiting(self) -> Protocol[Verdict]:
        """Return what the signals ask for that came while no workers ran, or while the cycle ended with another
        verdict. A node that had a part in the last cycle and does not leave ends the job, unless the job has another
        end already."""
        verdict = self.stop
        assert verdict is not None
        if verdict.again is not None:
            yield Emit(events.NodeExcluded(verdict.detail))
            self.leaves = verdict.detail
            return msgspec.structs.replace(verdict, again=None)
        end = yield from self._end_job(verdict)
        return verdict if end.outcome == verdict.outcome else end  # with the exit status of its own signal

    def closed(self, why: str) -> Protocol[Verdict]:
        """Return what follows from a rendezvous that no longer accepts this node. why: its reason."""
        words = (yield from self._rendezvous.newest()).closed
        return self._end_of_job(words) if words else (yield from self.leave(why))

    def _end_job(self, verdict: Verdict) -> Protocol[Verdict]:
        """End the job for all nodes, unless it has ended. Return the verdict that it ends with."""
        return self._end_of_job((yield from self._rendezvous.close(cycle.encode(verdict))))

    def _end_of_job(self, words: str) -> Verdict:
        """Return the verdict that the rendezvous was closed with."""
        with contextlib.suppress(DecodeError):
            return cycle.decode(words)
        return Verdict("failed", self.name, exit_code=cycle.FAILED, detail=words)

    def late(self, why: str) -> Verdict:
        """Return what follows from waiting for a place, or for enough nodes, in vain."""
        self.leaves = why
        return Verdict("failed", self.name, exit_code=cycle.FAILED, detail=why)

    def leave(self, why: str) -> Protocol[Verdict]:
        """Return the verdict of a node that goes while others may stay."""
        yield Emit(events.NodeExcluded(why))
        self.leaves = why
        return Verdict("excluded", self.name, exit_code=cycle.EXCLUDED, detail=why)

    def over(self, verdict: Verdict) -> Protocol[None]:
        """The job is over, for all nodes unless only this one leaves."""
        if not self.leaves:
            yield from self._rendezvous.close(cycle.encode(verdict))

    def ended_by_error(self, error: str) -> Protocol[Verdict]:
        """This agent failed by an error of its own. End the job for all nodes, unless it has an end already. Return
        the verdict that it ends with."""
        verdict = Verdict("failed", self.name, exit_code=cycle.FAILED, detail=error)
        if self._rendezvous.formation.rank_of(self._rendezvous.id) is not None:
            standing = yield from self.agree(verdict)
            if standing.again is None:
                return standing
        return verdict if self.leaves else (yield from self._end_job(verdict))

    def _why_not_continued(self, former: int) -> Protocol[str]:
        """Return why the job ends with the former cycle, empty if it goes on. A cycle without a verdict has lost all
        its agents, or they were taken for lost and come back: charge that."""
        verdict = yield from self.standing(former)
        if verdict is None:
            known = self._rendezvous.gathering
            seats = known.last.seats
            lost = [seat.node for seat in seats if seat.id not in known.arrived] or [seat.node for seat in seats]
            verdict = yield from self._spend(*self._loss(lost, former, -1, 0.0))
        return "" if verdict.again is not None else cycle.encode(verdict)

    # -- signals and requests -------------------------------------------------------------------

    def signalled(self, number: int, name: str) -> Protocol[None]:
        """Decide what a signal to this agent asks for: `stop`. A node that is to leave may still be told to stop the
        job."""
        if self.stop is not None and self.stop.again is None:
            return
        detail = f"{name} to the agent of {self.name}"
        leaves = (yield from self._mode(name)) == "leave"
        if leaves:
            detail += ", which leaves"
        yield Emit(events.StopRequested(detail, self.rules.grace, leaves))
        again: events.CycleReason | None = "membership" if leaves else None
        self.stop = Verdict("preempted", self.name, again, exit_code=128 + number, detail=detail)

    def _mode(self, name: str) -> Protocol[Mode]:
        """Return whether this node leaves or the job stops. An agent that leaves a cycle puts itself on a list, so
        that each knows of those before it, also of one that is signalled at the same moment."""
        rendezvous = self._rendezvous
        if rendezvous.formation.rank_of(rendezvous.id) is None:
            return "leave"  # it waits for a place
        others = yield from rendezvous.others(())
        asked = Asked(name, self.rules.mode, self._hosts_store, others, rendezvous.terms.least)
        if on_signal(asked) == "stop":
            return "stop"
        entries = SharedList(f"job/leaving/{rendezvous.cycle}")
        leaving: list[str] = []

        def is_listed() -> Protocol[bool]:
            leaving.extend((yield from entries.read()))
            return rendezvous.id in leaving

        yield from entries.append(rendezvous.id, is_listed)
        others = yield from rendezvous.others(leaving[: leaving.index(rendezvous.id)])
        return on_signal(msgspec.structs.replace(asked, others=others))

    def requested(self, requests: Sequence[Request]) -> Protocol[Verdict | None]:
        """Return what follows from signals to this agent and from its workers' requests, None if nothing does."""
        verdict = self.stop
        if verdict is None:
            verdict = control.answer(requests, self.name)
            if verdict is None:
                return None
            if verdict.again is not None:  # for the others
                self.excluded_for = verdict.detail
        return (yield from self.agree(verdict))

    # -- verdicts -------------------------------------------------------------------------------

    def agree(self, verdict: Verdict) -> Protocol[Verdict]:
        """Let a verdict stand for all agents of this cycle, unless another one does. Return the one that stands."""
        return (yield from self._obey((yield from self._rendezvous.end_cycle(cycle.encode(verdict)))))

    def standing(self, number: int | None = None) -> Protocol[Verdict | None]:
        """Return the verdict that stands for a cycle, None if there is none yet. number: of the cycle, this agent's if
        it is not given."""
        text = yield from self._rendezvous.cycle_end(number)
        return None if text is None else (yield from self._obey(text))

    def _obey(self, text: str) -> Protocol[Verdict]:
        """Read the verdict that stands, and charge the budget unless another agent has. A verdict that ends the job
        ends it at once, for an agent that waits for the next cycle may end it at the same moment."""
        verdict = cycle.decode(text)
        if verdict.failure is not None:
            yield from self.budget.spend(verdict.failure)
        return (yield from self._end_job(verdict)) if verdict.again is None else verdict

    def ran(self) -> Protocol[Seconds]:
        """Return for how many seconds this cycle has run."""
        now: Seconds = yield Now()
        return now - self._began_at

    def failed(self, failure: Failure) -> Protocol[Verdict | None]:
        """Return what follows from workers that failed here, None if the others go on without them."""
        yield from self._nodes.note("failed")
        around = yield from self._rendezvous.look(self._nodes.key)
        return (yield from self._weigh(around, failure))

    def look(self, workers: Workers) -> Protocol[Verdict | None]:
        """Return what follows from what others did: a verdict of theirs, the end of the last worker, a node that is
        lost or wants to join. None if nothing does."""
        rules = self.rules
        if control.is_premature(rules.policy, workers.apart, rules.apart):
            return (yield from self.agree(self._premature(f"rank {', '.join(map(str, workers.done))}")))
        now = yield Now()
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

    def _went_on(self) -> Protocol[Verdict | None]:
        """There is a next cycle, or none any more, or it is formed without this agent, and nobody has said so."""
        standing = yield from self.standing()  # perhaps by now
        if standing is not None or (yield IsInterrupted()):
            return standing
        if (yield from self._rendezvous.newest()).closed:
            return (yield from self.closed(""))
        return Verdict("interrupted", self.name, again="membership", detail="the others went on without this node")

    def _weigh(self, around: Around, failure: Failure | None = None) -> Protocol[Verdict | None]:
        """What the nodes of this cycle call for. failure: what happened here just now."""
        rules = self.rules
        nodes = yield from self._nodes.look(around.lost, around.counter)
        waited = yield from self._waited(nodes)
        match control.weigh(rules.policy, self._rendezvous.terms.least, nodes, waited, rules.apart):
            case "restart":
                return (yield from self._after_loss(nodes, failure))
            case "completed":
                return (yield from self.agree(Verdict("completed", self.name)))
            case "premature" if self._nodes.is_waiting:
                more = f" and {nodes.waiting - 1} other nodes" if nodes.waiting > 1 else ""
                return (yield from self.agree(self._premature(f"the workers of {self.name}{more}")))
        if control.takes_newcomers(rules.policy, nodes) and around.waiting:
            verdict = Verdict("interrupted", self.name, again="membership", detail="a node wants to join")
            return (yield from self.agree(verdict))
        return None

    def _waited(self, nodes: Nodes) -> Protocol[Seconds]:
        """Return for how many seconds nodes have been through while others were not, as seen here."""
        if not nodes.waiting:
            return 0.0
        now: Seconds = yield Now()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since

    def _premature(self, who: str) -> Verdict:
        """The verdict on workers that ended well, and long before the others."""
        detail = (
            f"premature completion: {who} ended well, and others did not within "
            f"{self.rules.apart:g} s (--exit-barrier-timeout)"
        )
        return Verdict("failed", self.name, exit_code=cycle.FAILED, detail=detail)

    def _after_loss(self, nodes: Nodes, failure: Failure | None) -> Protocol[Verdict | None]:
        """What follows from nodes that failed or are lost, if that is for this agent to say: of what happened here
        before, and the cycle went on with, nothing follows any more."""
        if failure is not None:
            verdict = Verdict("failed", self.name, detail=failure.what, rank=failure.rank)
            return (yield from self._spend(verdict, failure))
        if not nodes.lost:
            return None  # the agent where it failed knows what, and says it at once
        lost = [self._ids[id] for id in nodes.lost]
        step, ran = (yield HighestStep()), (yield from self.ran())
        return (yield from self._spend(*self._loss(lost, self._rendezvous.cycle, step, ran)))

    def _loss(self, nodes: Sequence[str], number: int, step: int, ran: Seconds) -> tuple[Verdict, Failure]:
        """The loss of nodes in a cycle, as the budget weighs it."""
        names = sorted(nodes)
        what = f"node {', '.join(names)} is lost"
        failure = Failure(number, f"lost {names[0]}", what, names[0], -1, step, ran=ran)
        return Verdict("failed", self.name, detail=what), failure

    def _spend(self, verdict: Verdict, failure: Failure) -> Protocol[Verdict]:
        """Ask the job's budget what follows from the failure of a cycle. Let the answer stand for it."""
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
                )
            )
        return standing
