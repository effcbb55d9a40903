"""What agents know of each other's nodes, in whatever order they tell and look, and what it costs the store."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.core import cycle_nodes
from resilience.core.control import Nodes
from resilience.core.cycle_nodes import Fact
from resilience.launcher.rendezvous.driving import Driver
from tests.unit.launcher.stores import Store


class CycleNodes:
    """One agent's view of a cycle's nodes, performed on a store."""

    def __init__(self, store: Store, cycle: int, nodes: Iterable[str], own: str) -> None:
        self._nodes = cycle_nodes.CycleNodes(cycle, nodes, own)
        self._run = Driver(store, lambda: False).run
        self._run(self._nodes.open())
        self.key = self._nodes.key

    @property
    def is_waiting(self) -> bool:
        return self._nodes.is_waiting

    def note(self, fact: Fact) -> bool:
        return self._run(self._nodes.note(fact))

    def look(self, lost: Iterable[str], count: int) -> Nodes:
        return self._run(self._nodes.look(lost, count))


def look(nodes: CycleNodes, store: Store, lost: Sequence[str] = ()) -> Nodes:
    return nodes.look(lost, store.add(nodes.key, 0))


def test_what_one_notes_all_know() -> None:
    store = Store()
    a, b = CycleNodes(store, 0, "ab", "a"), CycleNodes(store, 0, "ab", "b")
    a.note("failed")
    a.note("ended")
    assert look(a, store) == look(b, store) == Nodes(2, unhealthy=1)
    b.note("ended")
    assert look(a, store) == Nodes(2, unhealthy=1, waiting=1)
    assert look(b, store) == Nodes(2, unhealthy=1, waiting=1, is_over=True)  # the last one knows, and says so to all


def test_node_waits_for_the_others_once_it_is_through_and_well() -> None:
    store = Store()
    for facts, is_waiting in (((), False), (("failed",), False), (("failed", "ended"), False), (("ended",), True)):
        node = CycleNodes(store, 0, "ab", "a")
        for fact in facts:
            node.note(fact)
        assert node.is_waiting is is_waiting


def test_what_a_node_notes_twice_counts_once() -> None:
    store = Store()
    node = CycleNodes(store, 0, "abc", "a")
    assert [node.note("failed"), node.note("failed")] == [True, False]
    assert look(node, store) == Nodes(3, unhealthy=1)


def test_cycles_know_nothing_of_each_other() -> None:
    store = Store()
    CycleNodes(store, 0, "ab", "a").note("failed")
    assert look(CycleNodes(store, 1, "ab", "a"), store) == Nodes(2)


def test_node_that_is_lost_and_was_of_another_cycle_is_not_missed() -> None:
    store = Store()
    seen = look(CycleNodes(store, 0, "ab", "a"), store, ["b", "stranger"])
    assert seen == Nodes(2, unhealthy=1, lost=frozenset("b"))


@pytest.mark.parametrize("facts", [["failed"], ["ended"], ["failed", "ended"]])
def test_node_that_told_something_and_is_lost_then_counts_once(facts: list[Fact]) -> None:
    store = Store()
    a, b = (CycleNodes(store, 0, "abc", name) for name in "ab")
    for fact in facts:
        b.note(fact)
    assert look(a, store, "b") == Nodes(3, unhealthy=1, lost=frozenset("b"))


def test_cycle_completed_by_lost_nodes_is_over_only_at_the_second_look() -> None:
    store = Store()
    a = CycleNodes(store, 0, "abc", "a")
    a.note("ended")
    assert not look(a, store, "bc").is_over
    assert look(a, store, "bc").is_over


def test_look_at_which_nothing_has_changed_costs_nothing_beside_its_counter() -> None:
    store = Store()
    nodes = CycleNodes(store, 0, "abc", "a")
    nodes.note("failed")
    look(nodes, store, "b")
    look(nodes, store, "b")
    before = store.operations
    look(nodes, store, "b")
    assert store.operations == before + 1


def all_fail(agents: list[CycleNodes]) -> None:
    for agent in agents:
        agent.note("failed")


def all_end(agents: list[CycleNodes]) -> None:
    for agent in agents:
        agent.note("ended")


@pytest.mark.parametrize("happens", [all_fail, all_end])
def test_common_failures_and_ends_cost_each_agent_the_same_for_any_number(
    happens: Callable[[list[CycleNodes]], None],
) -> None:
    costs = {}
    for count in (10, 50, 200):
        store = Store()
        names = [f"node{number}" for number in range(count)]
        agents = [CycleNodes(store, 0, names, name) for name in names]
        happens(agents)
        for agent in agents:
            for _ in range(3):
                look(agent, store)
        costs[count] = store.operations / count
    assert max(costs.values()) < 10  # the first operation of each, its note, three looks
    assert costs[200] < costs[10] + 0.5


@given(st.integers(1, 40), st.integers(0, 10**6))
def test_cycle_is_over_for_the_last_node_and_for_no_node_before(count: int, seed: int) -> None:
    """Nodes end, fail or are lost in any order; lost ones are known to some agent at some time."""
    chance = random.Random(seed)
    names = [f"node{number}" for number in range(count)]
    store = Store()
    views = {name: CycleNodes(store, 3, names, name) for name in names}
    order = chance.sample(names, count)
    lost = {name for name in names[1:] if chance.random() < 0.2}
    failed, well = set(), set()
    told: list[str] = []
    for name in order:
        if chance.random() < 0.3:
            views[name].note("failed")
            failed.add(name)
        if name in lost:
            told.append(name)
        else:
            views[name].note("ended")
            well |= {name} - failed
        living = [one for one in names if one not in lost]
        for one in chance.sample(living, min(3, len(living))):
            seen = look(views[one], store, told)
            assert seen.unhealthy == len(failed | set(told))
            assert seen.waiting == len(well)
            assert not seen.is_over or name == order[-1]
    for one in names:
        if one not in lost:
            look(views[one], store, told)
    assert any(look(views[one], store, told).is_over for one in names if one not in lost)
