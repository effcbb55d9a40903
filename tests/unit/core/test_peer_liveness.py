"""The ring in which nodes watch each other, built by processes that run at the same time and may die in the middle."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator, Iterator
from typing import Any

from resilience.core.peer_liveness import COUNT_KEY, next_node, take_place
from resilience.core.restart import Add, CompareSet, Read, Set


class Store:
    """One operation at a time, like a store server."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def perform(self, operation: Any) -> Any:
        match operation:
            case Set(key, value):
                self.values[key] = value
            case Add(key, amount):
                self.values[key] = str(int(self.values.get(key, 0)) + amount)
                return int(self.values[key])
            case CompareSet(key, value):
                return self.values.setdefault(key, value)
            case Read(keys):
                return tuple(self.values.get(key) for key in keys)
        return None

    def run(self, protocol: Generator[Any, Any, Any]) -> Any:
        answer = None
        while True:
            try:
                answer = self.perform(protocol.send(answer))
            except StopIteration as stop:
                return stop.value


def take_places_together(store: Store, nodes: list[str], seed: int) -> dict[str, set[int]]:
    """Run several claims of each node, interleaved; some die after an operation. Return the places that were given."""
    chance = random.Random(seed)
    running = [(node, take_place(node)) for node in nodes for _ in range(chance.randint(1, 4))]
    answers: list[Any] = [None] * len(running)
    alive = set(range(len(running)))
    places: dict[str, set[int]] = {node: set() for node in nodes}
    while alive:
        index = chance.choice(sorted(alive))
        node, protocol = running[index]
        try:
            answers[index] = store.perform(protocol.send(answers[index]))
        except StopIteration as stop:
            places[node].add(stop.value)
            alive.discard(index)
        if chance.random() < 0.1:
            alive.discard(index)
    return places


def test_each_node_is_watched_by_exactly_one_other_node_whoever_takes_places_when() -> None:
    for seed in range(5000):
        judge_ring([f"node-{number}" for number in range(1 + seed % 5)], seed)


def judge_ring(nodes: list[str], seed: int) -> None:
    store = Store()
    given = take_places_together(store, nodes, seed)
    places = {node: store.run(take_place(node)) for node in nodes}  # each node's leader, at the latest
    assert all(given[node] <= {places[node]} for node in nodes)
    watched = [store.run(next_node(places[node])).node for node in nodes]
    assert sorted(watched) == (sorted(nodes) if len(nodes) > 1 else [""])
    assert all(name != node for name, node in zip(watched, nodes, strict=True))


def test_single_node_watches_nobody() -> None:
    store = Store()
    assert store.run(next_node(store.run(take_place("a")))).node == ""
    assert store.values[COUNT_KEY] == "1"


def test_neighbour_that_is_known_costs_one_operation() -> None:
    store = Store()
    places = [store.run(take_place(node)) for node in ("a", "b")]
    known = store.run(next_node(places[0]))
    operations = list(iterate(next_node(places[0], known), store))
    assert (known.node, operations) == ("b", [Add(COUNT_KEY, 0)])


def test_node_that_takes_its_place_late_becomes_the_neighbour() -> None:
    store = Store()
    places = [store.run(take_place(node)) for node in ("a", "b")]
    late = take_place("c")
    name = next(operation for operation in iterate(late, store) if isinstance(operation, Set))  # not yet performed
    known = store.run(next_node(places[1]))
    assert known.node == "a"
    store.perform(name)
    assert store.run(next_node(places[1], known)).node == "c"


def iterate(protocol: Generator[Any, Any, Any], store: Store) -> Iterator[Any]:
    """Show each operation before it is performed."""
    answer = None
    with contextlib.suppress(StopIteration):
        while True:
            operation = protocol.send(answer)
            yield operation
            answer = store.perform(operation)
