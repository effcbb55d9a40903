"""What follows for one agent from signals, from its workers, and from what other agents have written."""

from __future__ import annotations

import signal
from typing import Any

import msgspec
import pytest

from resilience.core import cycle, membership
from resilience.core.agent_protocol import Emit, NodeOperation, NodeProtocol, T
from resilience.core.budget import Budget, Failure
from resilience.core.control import Policy, Request
from resilience.core.cycle import CycleDecision
from resilience.core.job_budget import JobBudget
from resilience.core.membership import Arrived, Left, Membership, NodeSeat
from resilience.core.rendezvous import Rendezvous
from resilience.core.rendezvous_log import RendezvousLog
from resilience.core.supervision import Rules, Supervision, WorkerStates
from resilience.core.terms import Terms
from resilience.facts import events
from resilience.launcher.rendezvous.driving import Driver
from tests.unit.core.agents import TERMS, Run, agent, seat
from tests.unit.launcher.stores import Store

NODES = ("a", "b", "c")


class Agent:
    """One of three agents of a cycle. None of them is known to be gone."""

    def __init__(
        self,
        name: str,
        store: Store,
        least: int,
        is_host: bool = False,
        has_seat: bool = True,
        back: str = "",
        has_begun: bool = True,
        apart: float | None = None,
    ) -> None:
        """back: nodes that wait for the next cycle."""
        seats = tuple(NodeSeat(each, each, "here", 1) for each in NODES if has_seat or each != name)
        rendezvous = Rendezvous(name, name, Terms(least, len(NODES)))
        if has_begun:
            rendezvous.membership = Membership(cycle=4, seats=seats)
        rendezvous.arrivals = membership.fold(
            membership.begin(rendezvous.membership),
            [Arrived(NodeSeat(each, each, "here", 1), known=4) for each in NODES if each in back],
        )
        self.emitted: list[events.Event] = []
        self._supervision = Supervision(rendezvous, Rules("any-failed", Budget(3), apart), is_host)
        self._driver = Driver(store, lambda: False)

    def asked(self, *signals: int) -> CycleDecision | None:
        for number in signals:
            self._run(self._supervision.signalled(number, signal.Signals(number).name))
        return self._supervision.stop

    def look(self, workers: WorkerStates) -> CycleDecision | None:
        return self._run(self._supervision.look(workers))

    def standing(self) -> CycleDecision | None:
        return self._run(self._supervision.standing())

    def stops(self, number: int) -> CycleDecision:
        self.asked(number)
        return self._run(self._supervision.stopped_while_waiting())

    def why_not_continued(self) -> str:
        return self._run(self._supervision.why_not_continued(4))

    def over(self, verdict: CycleDecision) -> None:
        self._run(self._supervision.over(verdict))

    def cannot_start(self, is_of_node: bool = True) -> CycleDecision:
        return self._run(self._supervision.cannot_start("no memory", is_of_node))

    def waits_in_vain(self) -> CycleDecision:
        return self._run(self._supervision.late("node a found no place"))

    def cut_off(self) -> CycleDecision:
        return self._supervision.cut_off("10.0.0.1:29400", "it did not answer for 6 s")

    @property
    def leaves(self) -> str:
        return self._supervision.leaves

    def breaks(self) -> CycleDecision:
        return self._run(self._supervision.ended_by_error("RuntimeError"))

    def _run(self, protocol: NodeProtocol[T]) -> T:
        return self._driver.run_for_node(protocol, self._perform)

    def _perform(self, operation: NodeOperation) -> None:
        assert isinstance(operation, Emit)
        self.emitted.append(operation.event)


def what(verdict: CycleDecision | None) -> str:
    assert verdict is not None and verdict.outcome == "preempted"
    return "stop" if verdict.again is None else "leave"


def test_nothing_is_asked_without_a_signal() -> None:
    agent = Agent("a", Store(), 1)
    assert agent.asked() is None
    assert agent.emitted == []


def test_what_was_asked_for_holds_until_it_is_done_also_if_a_cycle_ends_for_another_reason() -> None:
    agent = Agent("a", Store(), 1)
    first = agent.asked(signal.SIGTERM)
    assert what(first) == "leave"
    assert agent.asked() is first
    assert agent.asked(signal.SIGTERM, signal.SIGINT) != first
    assert what(agent.asked()) == "stop"
    assert what(agent.asked(signal.SIGTERM)) == "stop"


def test_agents_that_are_signalled_at_the_same_moment_do_not_count_on_each_other() -> None:
    store = Store()
    agents = [Agent(name, store, least=2) for name in NODES]
    assert [what(agent.asked(signal.SIGTERM)) for agent in agents] == ["leave", "stop", "stop"]


def test_nodes_that_cannot_start_their_workers_at_the_same_time_leave_as_long_as_enough_remain() -> None:
    store = Store()
    agents = [Agent(name, store, least=1) for name in NODES]
    verdicts = [agent.cannot_start() for agent in agents]
    assert [verdict.outcome for verdict in verdicts] == ["interrupted", "interrupted", "failed"]
    assert [agent.emitted for agent in agents] == [[events.NodeUnhealthy("workers", "no memory")]] * 2 + [[]]
    assert Agent("a", Store(), least=3).cannot_start().outcome == "failed"
    assert Agent("a", Store(), least=1).cannot_start(is_of_node=False).outcome == "failed"


def test_program_that_one_node_cannot_execute_ends_the_job_on_all_nodes() -> None:
    store = Store()
    first, second = Agent("a", store, least=1), Agent("b", store, least=1)
    failed = first.cannot_start(is_of_node=False)
    assert second.standing() == failed


def test_agent_that_is_listed_by_another_one_on_its_way_to_the_list_counts_it() -> None:
    store = Store()
    first, second = Agent("a", store, least=2), Agent("b", store, least=2)
    seen: list[str] = []

    def signal_the_other() -> None:
        store.before = lambda: None
        seen.append(what(first.asked(signal.SIGTERM)))

    store.before = signal_the_other
    seen.append(what(second.asked(signal.SIGTERM)))
    assert seen == ["leave", "stop"]


def test_agent_that_waits_for_a_place_leaves_though_it_hosts_the_store() -> None:
    agent = Agent("a", Store(), 3, is_host=True, has_seat=False)
    assert what(agent.asked(signal.SIGINT)) == "leave"


@pytest.mark.parametrize(("is_host", "expected"), [(True, "stop"), (False, "leave")])
def test_job_that_has_not_begun_stops_with_the_agent_that_hosts_its_store(is_host: bool, expected: str) -> None:
    agent = Agent("a", Store(), 3, is_host=is_host, has_seat=False, has_begun=False)
    assert what(agent.asked(signal.SIGTERM)) == expected


def test_signalled_store_host_stops_the_job_before_it_knows_its_place_in_the_cycle() -> None:
    next_membership = Membership(cycle=0, seats=(seat("own"), seat("other")), by="other")
    for id, is_host, expected in (("own", True, "stop"), ("own", False, "leave"), ("late", True, "leave")):
        run = Run()
        run.run(RendezvousLog().write(Membership(), next_membership))
        supervision = Supervision(agent(run, id, TERMS), Rules("any-failed", Budget(3)), is_host)
        run.run(supervision.signalled(signal.SIGTERM, "SIGTERM"))
        assert what(supervision.stop) == expected


def test_job_has_the_end_that_was_first_where_one_agent_fails_and_another_is_asked_to_stop() -> None:
    store = Store()
    failed = Agent("a", store, 3).breaks()
    assert failed.outcome == "failed"
    assert Agent("b", store, 3).stops(signal.SIGINT) == failed
    store = Store()
    stopped = Agent("b", store, 3).stops(signal.SIGINT)
    assert (stopped.outcome, stopped.exit_code) == ("preempted", 130)
    assert Agent("c", store, 3).stops(signal.SIGTERM).exit_code == 143  # its own signal's
    assert Agent("a", store, 3).breaks() == stopped


def test_failed_agent_with_a_seat_ends_the_cycle_and_the_job_despite_a_restart() -> None:
    for has_seat in (True, False):
        store = Store()
        assert Agent("a", store, 3, has_seat=has_seat).breaks().outcome == "failed"
        assert ("end/4" in store.data) is has_seat
        assert ("cycle/5" in store.data) is has_seat  # closed; without a place it only leaves
    store = Store()
    store.set("end/4", cycle.encode(CycleDecision("interrupted", "b", again="membership")))
    ended = Agent("a", store, 3).breaks()
    assert (ended.outcome, ended.again) == ("failed", None)
    assert Agent("b", store, 3).stops(signal.SIGINT) == ended


def test_agent_that_fails_before_the_first_cycle_ends_the_job_for_all() -> None:
    store = Store()
    supervision = Supervision(Rendezvous("a", "a", Terms(3, 3)), Rules("any-failed", Budget(3)), False)
    Driver(store, lambda: False).run_for_node(supervision.ended_by_error("RuntimeError"), lambda operation: None)
    assert "cycle/0" in store.data


def test_agent_that_leaves_and_then_fails_does_not_end_the_job() -> None:
    store = Store()
    store.set("end/4", cycle.encode(CycleDecision("interrupted", "b", again="membership")))
    agent = Agent("a", store, 1)
    agent.stops(signal.SIGTERM)
    agent.breaks()
    assert "cycle/5" not in store.data


@pytest.mark.parametrize(("back", "lost"), [("", "a, b, c"), ("a", "b, c"), ("abc", "a, b, c")])
def test_cycle_without_a_verdict_is_charged_as_the_loss_of_those_that_have_not_come_back(back: str, lost: str) -> None:
    store = Store()
    assert Agent("a", store, 1, back=back).why_not_continued() == ""
    verdict = cycle.decode(store.data["end/4"].decode())
    assert verdict.failure is not None and verdict.failure.what == f"node {lost} is lost"
    assert Agent("b", store, 1, back="abc").why_not_continued() == ""
    assert cycle.decode(store.data["end/4"].decode()) == verdict


def test_node_that_leaves_is_put_on_record_and_does_not_end_the_job() -> None:
    store = Store()
    agent = Agent("a", store, 1)
    verdict = agent.stops(signal.SIGTERM)
    assert (verdict.outcome, verdict.again) == ("preempted", None)
    assert any(isinstance(event, events.NodeExcluded) for event in agent.emitted)
    agent.over(verdict)
    assert "cycle/5" not in store.data
    other = Agent("b", store, 1)
    other.over(CycleDecision("failed", "b", exit_code=1, detail="its workers cannot be started"))
    assert "cycle/5" in store.data


AGAIN = cycle.encode(CycleDecision("interrupted", "b", again="membership"))


@pytest.mark.parametrize("has_begun", [True, False])
def test_host_of_the_store_that_waits_in_vain_ends_a_job_that_cannot_go_on_without_it(has_begun: bool) -> None:
    store = Store()
    store.set("end/4", AGAIN)
    host = Agent("a", store, 3, is_host=True, has_seat=False, has_begun=has_begun)
    verdict = host.waits_in_vain()
    assert (verdict.outcome, verdict.exit_code, verdict.detail) == ("failed", 1, "node a found no place")
    assert not host.leaves
    assert ("cycle/5" if has_begun else "cycle/0") in store.data


def test_host_of_the_store_that_waits_in_vain_obeys_the_end_of_the_job() -> None:
    store = Store()
    end = Agent("b", store, 3).breaks()
    host = Agent("a", store, 3, is_host=True, has_seat=False)
    assert (host.waits_in_vain(), host.leaves) == (end, "")


@pytest.mark.parametrize(
    ("is_host", "least", "is_cycle_over"),
    [
        pytest.param(False, 3, True, id="others-have-the-store"),
        pytest.param(True, 2, True, id="the-others-are-enough"),
        pytest.param(True, 3, False, id="a-cycle-runs"),
    ],
)
def test_node_that_waits_in_vain_only_leaves_if_the_others_may_go_on(
    is_host: bool, least: int, is_cycle_over: bool
) -> None:
    store = Store()
    if is_cycle_over:
        store.set("end/4", AGAIN)
    late = Agent("a", store, least, is_host, has_seat=False)
    verdict = late.waits_in_vain()
    assert (verdict.outcome, verdict.detail, late.leaves) == ("failed", *("node a found no place",) * 2)
    assert "cycle/5" not in store.data


def test_node_that_alone_may_have_lost_the_store_leaves_and_closes_nothing() -> None:
    store = Store()
    lost = Agent("a", store, 1)
    verdict = lost.cut_off()
    detail = "node a could not reach the job's store at 10.0.0.1:29400: it did not answer for 6 s"
    assert (verdict.outcome, verdict.exit_code, verdict.detail, lost.leaves) == ("failed", 1, detail, detail)
    lost.over(verdict)
    assert "cycle/5" not in store.data


def test_host_of_the_store_that_lost_it_ends_the_job() -> None:
    store = Store()
    host = Agent("a", store, 1, is_host=True)
    verdict = host.cut_off()
    assert verdict.detail.startswith("the job's store at 10.0.0.1:29400, which node a hosts, is lost: ")
    assert (verdict.exit_code, host.leaves) == (1, "")
    host.over(verdict)
    assert "cycle/5" in store.data


def test_workers_that_end_long_before_the_others_of_their_node_end_the_job_if_there_is_a_limit() -> None:
    agent = Agent("a", Store(), 1, apart=300.0)
    verdict = agent.look(WorkerStates(True, 300.0, (2,)))
    assert verdict is not None and verdict.outcome == "failed" and "rank 2" in verdict.detail


# -- while workers run ----------------------------------------------------------------------------------------------

FOUR = msgspec.structs.replace(TERMS, most=4)
REASON = CycleDecision("failed", "other", exit_code=1, detail="its workers cannot be started")


def supervise(
    run: Run,
    *others: str,
    policy: Policy = "any-failed",
    most: int = 3,
    id: str = "own",
    apart: float | None = 30.0,
) -> Supervision:
    """Return an agent that has a seat in cycle 0 beside these, for 10 s. most: restarts of the job; apart: the limit
    by which nodes may finish apart."""
    own = agent(run, id, FOUR)
    for other in others:
        run.counts(other)
    next_membership = Membership(cycle=0, seats=(seat(id), *map(seat, others)), by="leader")
    found = Supervision(own, Rules(policy, Budget(most), apart), hosts_store=False)
    run.run(found.budget.open())
    run.run(own._log.write(Membership(), next_membership))
    own.membership, own.arrivals = next_membership, membership.begin(next_membership)
    assert run.run(found.began()) is None
    run.now += 10.0
    return found


def failure(what: str = "ValueError: bad", **changes: Any) -> Failure:
    return msgspec.structs.replace(Failure(0, "exception:1", what, "own", 1, -1, kind="exception"), **changes)


def looks(run: Run, own: Supervision, seconds: float, are_living: bool = True) -> CycleDecision | None:
    """Look once a second until there is a verdict."""
    until = run.now + seconds
    while run.now < until:
        verdict = run.run(own.look(WorkerStates(are_living)))
        if verdict is not None:
            return verdict
        run.now += 1.0
    return None


def decisions(run: Run) -> list[events.RestartDecided]:
    return [event for event in run.emitted if isinstance(event, events.RestartDecided)]


def test_failed_worker_restarts_the_cycle_and_the_decision_is_put_on_record_once() -> None:
    run = Run()
    own, other = supervise(run, "other"), supervise(run, "own", id="other")
    verdict = run.run(own.failed(failure()))
    assert verdict is not None and (verdict.outcome, verdict.again, verdict.rank) == ("failed", "failure", 1)
    assert run.run(other.failed(failure("OSError: gone", rank=0))) == verdict  # the first one stands
    assert [(each.verdict, each.why, each.restarts_used, each.lost_node) for each in decisions(run)] == [
        ("restart", "ValueError: bad", 1, None)
    ]
    assert run.run(own.budget.used()) == 1


def test_final_failure_ends_the_job_and_states_the_error_and_why_no_restart_follows() -> None:
    run = Run()
    verdict = run.run(supervise(run, "other", most=0).failed(failure()))
    assert verdict is not None and (verdict.outcome, verdict.again, verdict.exit_code) == ("exhausted", None, 1)
    assert verdict.detail.startswith("ValueError: bad; no restart is allowed")
    assert [each.verdict for each in decisions(run)] == ["stop"]
    run = Run()
    verdict = run.run(supervise(run, "other").failed(failure("SyntaxError: bad", is_final=True)))
    assert verdict is not None and verdict.detail == "the program cannot start: SyntaxError: bad"


def test_newcomer_knows_the_verdict_that_led_to_its_cycle_and_charges_nothing_for_it() -> None:
    run = Run()
    own = supervise(run, "other")
    own._rendezvous.membership = msgspec.structs.replace(own._rendezvous.membership, cycle=1)
    assert run.run(own.cause_of_cycle()) is None
    verdict = CycleDecision("failed", "other", "failure", failure=failure())
    run.store.data["end/0"] = cycle.encode(verdict)
    assert run.run(own.cause_of_cycle()) == verdict
    assert run.run(own.budget.used()) == 0


def test_agent_that_obeys_a_verdict_charges_the_budget_for_one_that_died_before_it_could() -> None:
    run = Run()
    own = supervise(run, "other")
    run.store.data["end/0"] = cycle.encode(CycleDecision("failed", "other", "failure", failure=failure()))
    for _ in range(2):
        verdict = run.run(own.standing())
        assert verdict is not None and verdict.again == "failure"
        assert run.run(own.budget.used()) == 1
    run = Run()
    own = supervise(run, "other")
    run.store.data["end/0"] = cycle.encode(CycleDecision("interrupted", "other", "membership"))
    assert run.run(own.standing()) is not None
    assert run.run(own.budget.used()) == 0


@pytest.mark.parametrize("leads", [True, False])
def test_failures_of_cycles_that_a_spare_missed_are_outside_its_window(leads: bool) -> None:
    run = Run()
    run.counts("other")
    allowed = Budget(100, same_in_window=2)
    spare = Supervision(agent(run, "own", msgspec.structs.replace(FOUR, least=1)), Rules("any-failed", allowed), False)
    run.run(spare.budget.open())
    past = [failure(cycle=number, step=100 * number) for number in range(5)]  # once in an hour
    for one in past:
        run.run(JobBudget(allowed).spend(one))
    run.now += 5 * 3600.0
    run.store.data["end/4"] = cycle.encode(CycleDecision("failed", "other", "failure", failure=past[-1]))
    last = Membership(cycle=4, seats=(seat("other"),), by="other")
    run.run(RendezvousLog().write(Membership(), last))
    if leads:
        run.writes(Arrived(seat("other"), known=4))
    else:
        next_membership = Membership(cycle=5, seats=(seat("other"), seat("own")), by="other")
        run.store.data["leader/5/0"] = "other"
        waits_until = run.now + 1.0

        def lead(operation: object) -> None:
            if run.now >= waits_until:
                run.run(RendezvousLog().write(last, next_membership))

        run.before = lead
    formed = run.run(spare.join(seat("own")))
    assert isinstance(formed, Membership) and formed.by == ("own" if leads else "other")
    assert run.run(spare.began()) is None
    assert spare.restarts_used == 5
    for number in range(5, 8):
        answer = run.run(spare.budget.decide(failure(cycle=number, step=100 * number)))
        assert answer.is_restart is (number < 7), answer.why
        run.run(spare.budget.spend(failure(cycle=number, step=100 * number)))


def test_failure_of_the_cycle_in_which_an_agent_took_part_is_inside_its_window() -> None:
    """Another agent has charged the budget for it, and this one has not read it yet."""
    run = Run()
    run.counts("other")
    allowed = Budget(100, same_in_window=2)
    rendezvous = agent(run, "own", msgspec.structs.replace(FOUR, least=1))
    own = Supervision(rendezvous, Rules("any-failed", allowed), hosts_store=False)
    run.run(own.budget.open())
    past = failure(cycle=4, step=400)
    run.run(JobBudget(allowed).spend(past))
    run.store.data["end/4"] = cycle.encode(CycleDecision("failed", "other", "failure", failure=past))
    rendezvous.membership = Membership(cycle=4, seats=(seat("other"), seat("own")), by="other")
    run.run(RendezvousLog().write(Membership(), rendezvous.membership))
    run.writes(Arrived(seat("other"), known=4))
    assert isinstance(run.run(own.join(seat("own"))), Membership)
    assert run.run(own.began()) is None
    for number in (5, 6):
        answer = run.run(own.budget.decide(failure(cycle=number, step=100 * number)))
        assert answer.is_restart is (number < 6), answer.why
        run.run(own.budget.spend(failure(cycle=number, step=100 * number)))


def test_lost_node_restarts_the_cycle_once_it_is_silent_for_long_enough() -> None:
    run = Run()
    own = supervise(run, "a", "b")
    assert looks(run, own, 60.0) is None
    run.falls_silent("b")
    verdict = looks(run, own, 60.0)
    assert verdict is not None and (verdict.again, verdict.detail) == ("failure", "node b is lost")
    assert [each.lost_node for each in decisions(run)] == ["b"]


def test_node_that_left_the_cycle_by_itself_is_a_reason_for_a_new_one_and_no_failure() -> None:
    run = Run()
    own = supervise(run, "a", "b", most=0)
    run.writes(Left("b", "was asked to stop"))
    verdict = looks(run, own, 20.0)
    assert verdict is not None and (verdict.again, verdict.failure) == ("membership", None)
    assert (verdict.detail, run.keys("job/failure/")) == ("node b has left", [])


def test_node_that_left_does_not_hide_one_that_is_lost() -> None:
    run = Run()
    own = supervise(run, "a", "b")
    run.writes(Left("b", "was asked to stop"), Left("a", is_lost=True), Left("a", "its agent was only stopped"))
    verdict = looks(run, own, 20.0)
    assert verdict is not None and (verdict.again, verdict.detail) == ("failure", "node a is lost")


def test_cycle_that_all_its_nodes_left_by_themselves_is_not_charged() -> None:
    run = Run()
    own = supervise(run, "a", most=0)
    run.writes(Left("own", "was asked to stop"), Left("a", "was asked to stop"))
    run.run(own._rendezvous.read())
    assert run.run(own.why_not_continued(0)) == ""
    standing = run.run(own.standing(0))
    assert standing is not None and (standing.again, standing.failure) == ("membership", None)


def test_failure_of_another_node_is_left_to_its_own_agent() -> None:
    run = Run()
    own, other = supervise(run, "other"), supervise(run, "own", id="other")
    run.run(other._nodes.note("failed"))
    assert looks(run, own, 20.0) is None
    assert "end/0" not in run.store.data


def test_node_that_waits_is_a_reason_for_a_new_cycle_unless_workers_help_themselves() -> None:
    for policy, again in (("any-failed", "membership"), ("min-healthy", None)):
        run = Run()
        own = supervise(run, "other", policy=policy)  # type: ignore[arg-type]
        assert looks(run, own, 20.0) is None
        run.writes(Arrived(seat("new")))
        verdict = looks(run, own, 20.0)
        assert (None if verdict is None else verdict.again) == again


def test_worker_may_run_on_after_the_others_of_its_node_for_as_long_as_it_needs() -> None:
    run = Run()
    own = supervise(run, apart=None)
    assert run.run(own.look(WorkerStates(True, 10.0**9, (1,)))) is None


def test_workers_are_not_late_before_any_of_their_node_has_ended() -> None:
    run = Run()
    own = supervise(run, apart=0.0)
    assert run.run(own.look(WorkerStates(are_living=True))) is None


def test_node_whose_workers_end_well_waits_for_the_others_for_as_long_as_they_need() -> None:
    run = Run()
    own = supervise(run, "other", apart=None)
    assert looks(run, own, 5_000.0, are_living=False) is None
    run.falls_silent("other")
    verdict = looks(run, own, 100.0, are_living=False)
    assert verdict is not None and verdict.detail == "node other is lost"


def test_node_whose_workers_end_well_waits_only_until_the_limit_if_there_is_one() -> None:
    run = Run()
    own = supervise(run, "other", policy="min-healthy")
    assert looks(run, own, 100.0) is None
    ended_at = run.now
    verdict = looks(run, own, 100.0, are_living=False)
    assert verdict is not None and "the workers of own ended well" in verdict.detail
    assert 30.0 <= run.now - ended_at < 40.0


# -- what follows from others ---------------------------------------------------------------------------------------


def test_agent_that_the_others_went_on_without_obeys_what_stands_by_then() -> None:
    closed = cycle.encode(CycleDecision("completed", "other"))
    for told, is_closed, interrupted_at, outcome in (
        (True, True, 1000.0, "failed"),
        (False, True, 0.0, None),  # its signal is looked at first
        (False, True, 1000.0, "completed"),
        (False, False, 1000.0, "interrupted"),
    ):
        run = Run()
        own = supervise(run, "other")
        run.interrupted_at = interrupted_at
        if told:
            run.store.data["end/0"] = cycle.encode(CycleDecision("failed", "other", "failure", failure=failure()))
        if is_closed:
            run.run(agent(run, "closes").close(closed))
        verdict = run.run(own._went_on())
        assert (None if verdict is None else verdict.outcome) == outcome


def test_agent_looks_whether_the_others_went_on_where_its_cycle_is_over() -> None:
    run = Run()
    own = supervise(run, "other")
    assert looks(run, own, 5.0) is None
    run.writes(Left("own", "gave no sign of life", is_lost=True))
    verdict = looks(run, own, 5.0)
    assert verdict is not None and verdict.detail == "the others went on without this node"


def test_host_of_the_store_that_has_left_stops_the_others_with_its_signal() -> None:
    run = Run()
    host, other = supervise(run, "other"), supervise(run, "own", id="other")
    assert not host.is_job_over
    end = run.run(host.stop_others(15, "SIGTERM"))
    assert (end.outcome, end.exit_code) == ("preempted", 143)
    assert host.is_job_over
    assert looks(run, other, 20.0) == end
    assert other.is_job_over


def test_job_goes_on_after_a_verdict_that_starts_it_again() -> None:
    run = Run()
    own = supervise(run, "other")
    assert run.run(own.failed(failure())) is not None
    assert not own.is_job_over


def test_closed_rendezvous_is_an_end_of_the_job_with_its_verdict_or_of_this_node_alone() -> None:
    run = Run()
    own = supervise(run, "other")
    verdict = run.run(own.closed("node own is excluded"))
    assert (verdict.outcome, verdict.detail, own.leaves) == ("excluded", "node own is excluded", "node own is excluded")
    for words, ends in ((cycle.encode(REASON), REASON), ("over", CycleDecision("failed", "own", None, 1, "over"))):
        run = Run()
        own = supervise(run, "other")
        run.run(agent(run, "closes").close(words))
        assert (run.run(own.closed("node own is excluded")), own.leaves) == (ends, "")


def test_request_to_exclude_a_node_starts_a_cycle_without_it_and_shutdown_ends_the_job() -> None:
    run = Run()
    own = supervise(run, "other")
    assert run.run(own.requested([])) is None
    assert run.run(own.excluded()) is None
    verdict = run.run(own.requested([Request("ExcludeThisNode", "its fan is broken")]))
    assert verdict is not None and verdict.again == "request"
    verdict = run.run(own.excluded())
    assert verdict is not None and verdict.outcome == "excluded" and "its fan is broken" in verdict.detail
    assert run.store.data["excluded/own"] and own.leaves == verdict.detail
    assert [event.why for event in run.emitted if isinstance(event, events.NodeExcluded)] == [verdict.detail]
    run = Run()
    own = supervise(run, "other")
    verdict = run.run(own.requested([Request("ShutdownWorkload", "enough")]))
    assert verdict is not None and verdict.outcome == "shutdown"
    assert run.run(own.excluded()) is None


def test_signal_comes_before_what_a_rank_asks_for_and_says_whether_the_node_leaves() -> None:
    for number, words in (
        (signal.SIGTERM, "SIGTERM to the agent of own, which leaves"),
        (signal.SIGINT, "SIGINT to the agent of own"),
    ):
        run = Run()
        own = supervise(run, "a", "b")
        run.run(own.signalled(number, number.name))
        verdict = run.run(own.requested([Request("ShutdownWorkload", "enough")]))
        assert verdict is not None and (verdict.outcome, verdict.detail) == ("preempted", words)
