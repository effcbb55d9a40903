"""What an agent's looks around cost the job's store: the same for any number of nodes. All agents in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from resilience.core import membership
from resilience.core.membership import Around, Membership, NodeSeat
from resilience.core.rendezvous import NEARLY_LAST
from resilience.core.rendezvous_log import RendezvousLog
from resilience.launcher.rendezvous import handler as rendezvous
from resilience.launcher.rendezvous.handler import Handler
from resilience.launcher.rendezvous.job_store import RendezvousStore
from tests.unit.launcher.stores import Store

COUNTS = (4, 50, 200)
Make = Callable[..., tuple[Store, list[Handler]]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make agents that take part in a cycle. None of them counts while the test runs, and the first hosts nothing."""
    made: list[Handler] = []

    def begin(count: int, attempts: int = 2) -> tuple[Store, list[Handler]]:
        store = Store()
        place = RendezvousStore(lambda: store, ("127.0.0.1", 1), "here", forget=lambda: None)
        monkeypatch.setattr(rendezvous, "meet", lambda *_: place)
        monkeypatch.setattr("torch.distributed.PrefixStore", lambda _, inner: inner)
        conf: dict[str, Any] = {"keep_alive_interval": 3600, "keep_alive_max_attempt": attempts}
        parameters = RendezvousParameters("c10d", "here:1", "job", 1, count, **conf)
        handlers = [Handler(parameters, _NoStores(), f"node{number}") for number in range(count)]  # type: ignore[arg-type]
        made.extend(handlers)
        seats = tuple(NodeSeat(each.id, each.node, "here", 1) for each in handlers)
        first = Membership(cycle=0, seats=seats, entries=0)
        store.add("log/count", 0)
        handlers[0].run(RendezvousLog().write(Membership(), first))
        for each in handlers:
            each.rendezvous.membership, each.rendezvous.arrivals = first, membership.begin(first)
        return store, handlers

    yield begin
    for handler in made:
        handler._heartbeat._stop.set()
        os.close(handler.watch._read)  # an agent keeps its pipe until its process ends
        os.close(handler.watch._write)


class _NoStores:
    """No process for stores."""

    pid = 0

    def ask(self, address: str) -> None:
        pass


def look(handler: Handler) -> Around:
    return handler.run(handler.rendezvous.look("log/count"))


def each_costs(store: Store, handlers: list[Handler], act: Callable[[Handler], Any]) -> float:
    before = store.operations
    for handler in handlers:
        act(handler)
    return (store.operations - before) / len(handlers)


def test_look_at_which_nothing_is_new_is_one_operation(make: Make) -> None:
    for count in COUNTS:
        store, handlers = make(count)
        each_costs(store, handlers, look)
        costs = [each_costs(store, handlers, look) for _ in range(20)]
        assert sum(costs) / 20 <= 1.2  # now and then one asks for the next cycle


def test_loss_of_a_node_costs_each_agent_the_same_for_any_number(make: Make) -> None:
    costs = {}
    for count in COUNTS:
        store, handlers = make(count)
        handlers[1].run(handlers[1].rendezvous.tell_lost(handlers[2].id, time.monotonic()))
        costs[count] = each_costs(store, handlers, look)
        assert {look(handler).lost for handler in handlers} == {frozenset({handlers[2].id})}
    assert max(costs.values()) <= 5


def test_each_node_is_watched_by_the_nearest_node_that_is_not_gone(make: Make) -> None:
    _, handlers = make(4)
    handlers[3].run(handlers[3].rendezvous.tell_lost(handlers[2].id, time.monotonic()))
    assert [watched_by(handler) for handler in handlers] == ["node3", "node0", "node1", "node2"]
    for handler in handlers:
        look(handler)
    assert [watched_by(handler) for handler in handlers] == ["node3", "node0", "node1", "node1"]


def watched_by(handler: Handler) -> str | None:
    """Return the node that an agent watches now."""
    seat = membership.neighbour(handler.rendezvous.arrivals, handler.membership, handler.id)
    return None if seat is None else seat.node


def test_agent_counts_more_often_if_it_may_be_silent_for_one_interval_only(make: Make) -> None:
    for attempts, pause in ((1, 900.0), (4, 3600.0)):
        _, (handler,) = make(1, attempts)
        assert handler._heartbeat._interval == pause


def test_leaving_costs_the_same_for_any_number_and_reads_no_log_while_many_others_remain(make: Make) -> None:
    costs = {}
    for count in COUNTS[1:]:
        store, handlers = make(count)
        handlers[0].set_closed()
        costs[count] = each_costs(store, handlers, leave)
        assert each_costs(store, handlers[: -1 - NEARLY_LAST], Handler._await_leaving) == 2
    assert costs[200] <= costs[50] <= 8


def leave(handler: Handler) -> None:
    handler.set_closed()
    handler.run(handler.rendezvous.leave(""))
