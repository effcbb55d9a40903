"""The ring in which nodes watch each other, built by processes that run at the same time and may die in the middle."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator, Iterator
from typing import Any

from resilience.core.peer_liveness import COUNT_KEY, TOGETHER, PeerRing, beat_key, look, take_place
from resilience.core.restart import Add, CompareSet, Read, Set

ALLOWED = 30.0  # seconds of silence


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
    watched = [watched_by(store, places[node]) for node in nodes]
    assert sorted(watched) == (sorted([node] for node in nodes) if len(nodes) > 1 else [[]])
    assert all([node] != names for names, node in zip(watched, nodes, strict=True))


def watched_by(store: Store, place: int, known: PeerRing = PeerRing()) -> list[str]:  # noqa: B008  immutable
    ring, _ = store.run(look(place, known, 0.0, ALLOWED))
    return list(ring.watched)


def test_single_node_watches_nobody() -> None:
    store = Store()
    assert watched_by(store, store.run(take_place("a"))) == []
    assert store.values[COUNT_KEY] == "1"


def test_look_at_a_known_node_costs_two_operations() -> None:
    store = Store()
    places = [store.run(take_place(node)) for node in ("a", "b")]
    known, _ = store.run(look(places[0], PeerRing(), 0.0, ALLOWED))
    operations = list(iterate(look(places[0], known, 1.0, ALLOWED), store))
    assert operations == [Add(COUNT_KEY, 0), Add(beat_key("b"), 0)]


def test_node_that_takes_its_place_late_becomes_the_neighbour() -> None:
    store = Store()
    places = [store.run(take_place(node)) for node in ("a", "b")]
    late = take_place("c")
    name = next(operation for operation in iterate(late, store) if isinstance(operation, Set))  # not yet performed
    known, _ = store.run(look(places[1], PeerRing(), 0.0, ALLOWED))
    assert list(known.watched) == ["a"]
    store.perform(name)
    assert watched_by(store, places[1], known) == ["c"]


def silences(size: int, ends: dict[int, float], until: float) -> dict[int, float]:
    """Let the first node of a ring look once a second. Return when each node was first found silent, by its number.

    ends: when a node stops to raise its counter, by its number; the others go on."""
    store = Store()
    for number in range(size):
        store.run(take_place(f"node-{number}"))
    found: dict[int, float] = {}
    ring, now = PeerRing(), 0.0
    while now < until:
        for number in range(size):
            if now < ends.get(number, until):
                store.perform(Add(beat_key(f"node-{number}"), 1))
        ring, silent = store.run(look(1, ring, now, ALLOWED))
        for node in silent:
            found.setdefault(int(node.node.removeprefix("node-")), now)
        now += 1.0
    return found


def test_nodes_lost_one_after_another_are_all_found_silent() -> None:
    ends = {1: 10.0, 2: 100.0, 3: 200.0}
    found = silences(5, ends, until=300.0)
    assert found.keys() == ends.keys()
    assert all(found[number] - end <= ALLOWED + 2 for number, end in ends.items())


def test_nodes_of_a_rack_lost_at_once_are_found_in_twice_the_time_of_one() -> None:
    lost = range(1, TOGETHER + 2)
    found = silences(TOGETHER + 10, dict.fromkeys(lost, 10.0), until=200.0)
    assert list(found) == list(lost)
    assert max(found.values()) - 10.0 <= 2 * ALLOWED + 3


def test_node_that_is_the_last_of_its_ring_watches_nobody_twice() -> None:
    assert list(silences(4, dict.fromkeys((1, 2, 3), 10.0), until=200.0)) == [1, 2, 3]


def test_nodes_that_need_no_further_look_cost_no_operation() -> None:
    store = Store()
    for number in range(TOGETHER + 10):
        store.run(take_place(f"node-{number}"))
    settled = [f"node-{number}" for number in range(1, TOGETHER + 2)]
    known, _ = store.run(look(1, PeerRing(), 0.0, ALLOWED))
    known, _ = store.run(look(1, known, 1.0, ALLOWED, settled))
    store.perform(Add(beat_key(f"node-{TOGETHER + 2}"), 1))
    operations = list(iterate(look(1, known, 2.0, ALLOWED, settled), store))
    assert operations == [Add(COUNT_KEY, 0), Add(beat_key(f"node-{TOGETHER + 2}"), 0)]


def test_nodes_after_settled_ones_are_watched_together() -> None:
    store = Store()
    for number in range(2 * TOGETHER):
        store.run(take_place(f"node-{number}"))
    known, _ = store.run(look(1, PeerRing(), 0.0, ALLOWED, ["node-1"]))
    assert len(known.watched) == TOGETHER


def test_node_that_is_heard_again_is_watched_alone() -> None:
    store = Store()
    for node in ("a", "b", "c"):
        store.run(take_place(node))
    ring, _ = store.run(look(1, PeerRing(), 0.0, ALLOWED))
    ring, silent = store.run(look(1, ring, ALLOWED, ALLOWED))
    assert ([node.node for node in silent], list(ring.watched)) == (["b"], ["b", "c"])
    store.perform(Add(beat_key("b"), 1))
    ring, silent = store.run(look(1, ring, ALLOWED + 1, ALLOWED))
    assert (silent, list(ring.watched)) == ((), ["b"])


def test_watched_nodes_stay_few_while_their_neighbours_live() -> None:
    store = Store()
    for number in range(100):
        store.run(take_place(f"node-{number}"))
    assert watched_by(store, 1) == ["node-1"]


def iterate(protocol: Generator[Any, Any, Any], store: Store) -> Iterator[Any]:
    """Show each operation before it is performed."""
    answer = None
    with contextlib.suppress(StopIteration):
        while True:
            operation = protocol.send(answer)
            yield operation
            answer = store.perform(operation)
