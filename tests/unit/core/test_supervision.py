"""What signals to an agent ask for, with what other agents have written into the job's store."""

from __future__ import annotations

import signal

import pytest

from resilience.core import cycle, events, gathering
from resilience.core.agent_protocol import Emit, HighestStep
from resilience.core.budget import Budget
from resilience.core.cycle import Verdict
from resilience.core.gathering import Arrived, Formation, Seat
from resilience.core.rendezvous import Rendezvous, Terms
from resilience.core.supervision import Rules, Supervision, Workers
from resilience.launcher.driving import Driver
from tests.unit.launcher.stores import Store

NODES = ("a", "b", "c")


class Agent:
    """One of three agents of a cycle. None of them is known to be gone."""

    def __init__(
        self, name: str, store: Store, least: int, is_host: bool = False, has_seat: bool = True, back: str = ""
    ) -> None:
        """back: nodes that wait for the next cycle."""
        seats = tuple(Seat(each, each, "here", 1) for each in NODES if has_seat or each != name)
        rendezvous = Rendezvous(name, name, Terms(least, len(NODES)))
        rendezvous.formation = Formation(cycle=4, seats=seats)
        rendezvous.gathering = gathering.fold(
            gathering.begin(rendezvous.formation),
            [Arrived(Seat(each, each, "here", 1), known=4) for each in NODES if each in back],
        )
        self._rendezvous = rendezvous
        self.emitted: list[events.Event] = []
        self._supervision = Supervision(rendezvous, Rules("any-failed", Budget(3)), is_host)
        self._run = Driver(store, lambda: False).run

    def asked(self, *signals: int) -> Verdict | None:
        for number in signals:
            self._run(self._supervision.signalled(number, signal.Signals(number).name), self._perform)
        return self._supervision.stop

    def look(self, workers: Workers) -> Verdict | None:
        return self._run(self._supervision.look(workers))

    def stops(self, number: int) -> Verdict:
        self.asked(number)
        return self._run(self._supervision.stopped_while_waiting(), self._perform)

    def why_not_continued(self) -> str:
        return self._run(self._rendezvous.why_not_continued(4), self._perform)

    def over(self, verdict: Verdict) -> None:
        self._run(self._supervision.over(verdict))

    def breaks(self) -> Verdict:
        return self._run(self._supervision.ended_by_error("RuntimeError"))

    def _perform(self, operation: Emit | HighestStep) -> None:
        assert isinstance(operation, Emit)
        self.emitted.append(operation.event)


def what(verdict: Verdict | None) -> str:
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


def test_job_has_the_end_that_was_first_where_one_agent_fails_and_another_is_told_to_stop() -> None:
    store = Store()
    failed = Agent("a", store, 3).breaks()
    assert failed.outcome == "failed"
    assert Agent("b", store, 3).stops(signal.SIGINT) == failed
    store = Store()
    stopped = Agent("b", store, 3).stops(signal.SIGINT)
    assert (stopped.outcome, stopped.exit_code) == ("preempted", 130)
    assert Agent("c", store, 3).stops(signal.SIGTERM).exit_code == 143  # its own signal's
    assert Agent("a", store, 3).breaks() == stopped


def test_agent_that_fails_ends_its_cycle_if_it_has_a_seat_and_the_job_also_if_its_cycle_starts_again() -> None:
    for has_seat in (True, False):
        store = Store()
        assert Agent("a", store, 3, has_seat=has_seat).breaks().outcome == "failed"
        assert ("end/4" in store.data) is has_seat
    store = Store()
    store.set("end/4", cycle.encode(Verdict("interrupted", "b", again="membership")))
    ended = Agent("a", store, 3).breaks()
    assert (ended.outcome, ended.again) == ("failed", None)
    assert Agent("b", store, 3).stops(signal.SIGINT) == ended


def test_agent_that_leaves_and_then_fails_does_not_end_the_job() -> None:
    store = Store()
    store.set("end/4", cycle.encode(Verdict("interrupted", "b", again="membership")))
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
    other.over(Verdict("failed", "b", exit_code=1, detail="its workers cannot be started"))
    assert "cycle/5" in store.data


def test_workers_of_a_node_that_end_long_before_its_others_end_the_job() -> None:
    agent = Agent("a", Store(), 1)
    verdict = agent.look(Workers(True, 300.0, (2,)))
    assert verdict is not None and verdict.outcome == "failed" and "rank 2" in verdict.detail
