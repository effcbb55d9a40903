"""What signals to an agent ask for, with what other agents have written into the job's store."""

from __future__ import annotations

import signal
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

from resilience.core import events
from resilience.core.cycle import Verdict
from resilience.launcher.stopping import Stopping
from tests.unit.launcher.stores import Store

NODES = ("a", "b", "c")


class Agent:
    """One of three agents of a cycle. None of them is known to be gone."""

    def __init__(self, name: str, store: Store, least: int, is_host: bool = False, has_seat: bool = True) -> None:
        self.received: list[int] = []
        self.emitted: list[events.Event] = []
        handler = SimpleNamespace(
            id=name,
            cycle=4,
            is_host=is_host,
            job_store=store,
            formation=SimpleNamespace(rank_of=lambda id: NODES.index(id) if has_seat else None),
            others=lambda leaving: self.others(name, leaving),
        )
        signals = SimpleNamespace(take=self.take)
        account = SimpleNamespace(node=name, emit=self.emitted.append)
        fakes: list[Any] = [account, handler, None, signals, None]
        self._stopping = Stopping(*fakes, least, "leave", 30.0)

    def others(self, name: str, leaving: Collection[str]) -> int:
        return len(set(NODES) - {name, *leaving})

    def take(self) -> list[int]:
        taken, self.received = self.received, []
        return taken

    def asked(self, *signals: int) -> Verdict | None:
        self.received += signals
        return self._stopping.asked()


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
