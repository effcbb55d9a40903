"""What agents know of each other's nodes, in whatever order they tell and look."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from resilience.core.control import Nodes
from resilience.launcher.cycle_nodes import CycleNodes, Fact
from tests.unit.launcher.stores import Store


def seen(all: str, ended: str = "", failed: str = "", lost: str = "") -> Nodes:
    return Nodes(frozenset(all), frozenset(ended), frozenset(failed), frozenset(lost))


def test_what_one_notes_all_know() -> None:
    store = Store()
    a, b = CycleNodes(store, 0, "ab", "a"), CycleNodes(store, 0, "ab", "b")
    a.note("failed")
    a.note("ended")
    b.note("ended")
    assert a.look() == b.look() == seen("ab", ended="ab", failed="a")


def test_cycles_know_nothing_of_each_other() -> None:
    store = Store()
    CycleNodes(store, 0, "ab", "a").note("failed")
    assert CycleNodes(store, 1, "ab", "a").look() == seen("ab")


def test_node_that_is_lost_and_was_of_another_cycle_is_not_missed() -> None:
    assert CycleNodes(Store(), 0, "ab", "a").look(["b", "stranger"]) == seen("ab", lost="b")


def test_look_at_which_nothing_has_changed_is_one_operation() -> None:
    store = Store()
    nodes = CycleNodes(store, 0, "ab", "a")
    nodes.note("failed")
    nodes.look()
    before = store.operations
    nodes.look()
    assert store.operations == before + 1


@given(st.integers(2, 6), st.integers(0, 10**6))
def test_facts_are_noted_once_and_never_taken_back(count: int, seed: int) -> None:
    chance = random.Random(seed)
    names = "abcdef"[:count]
    store = Store()
    views = {name: CycleNodes(store, 3, names, name) for name in names}
    told: dict[Fact, set[str]] = {"failed": set(), "ended": set()}
    known = {name: seen(names) for name in names}
    facts: tuple[Fact, ...] = ("failed", "ended", "failed")
    pending: list[tuple[str, Fact]] = [(name, fact) for name in names for fact in facts if chance.random() < 0.6]
    chance.shuffle(pending)
    acting: list[str] = []  # an agent has one thread: it does one thing after the other

    def act(name: str, fact: Fact) -> None:
        acting.append(name)
        views[name].note(fact)
        told[fact].add(name)
        before_it = told["failed"].copy(), told["ended"].copy()
        now = views[name].look()
        assert now.failed >= known[name].failed and now.ended >= known[name].ended
        assert now.failed >= before_it[0] and now.ended >= before_it[1]
        known[name] = now
        acting.remove(name)

    def before() -> None:
        others = [one for one in pending if one[0] not in acting]
        if others and chance.random() < 0.3:
            pending.remove(others[0])
            act(*others[0])

    store.before = before
    while pending:
        act(*pending.pop())
    store.before = lambda: None
    assert len(store.data) == len(told["failed"]) + len(told["ended"])
    final = seen(names, "".join(told["ended"]), "".join(told["failed"]))
    assert all(view.look() == final for view in views.values())
