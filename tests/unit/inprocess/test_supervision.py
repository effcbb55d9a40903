"""What the leader of a node asks of the store while nothing happens."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from resilience.adapters.store import drive, execute
from resilience.core.peer_liveness import take_place
from resilience.core.restart import Add
from resilience.inprocess import supervision
from resilience.inprocess.supervision import Supervisor, announce, entry_of

HOUR = 3600


class Counting:
    """A store that counts what is asked of it."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name != "has_extended_api":  # answered without the server
            self.calls.append(name)
        return getattr(self.store, name)


@pytest.mark.parametrize("nodes", [1, 2, 1000])
def test_leader_of_a_node_asks_the_store_once_a_second_at_any_number_of_nodes(
    nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds, time_ns=time.time_ns)
    monkeypatch.setattr(supervision, "time", clock)
    store = Counting()
    names = [f"node-{number}" for number in range(nodes)]
    for rank, name in enumerate(names[:2]):
        announce(store.store, name, entry_of(rank, os.getpid(), os.getpid()))
    for name in names[2:]:
        drive(take_place(name), store.store)
    lost: list[Any] = []
    begin: Any = SimpleNamespace(origin=SimpleNamespace(node=names[0]), heartbeat_timeout=30.0, interval=1.0)
    supervisor = Supervisor(begin, "", lambda: store, lost.append, lambda event: lost.append(event))
    supervisor._store, supervisor._place = store, 1
    for second in range(1, HOUR):
        clock.seconds = float(second)
        for name in names[1:2]:
            execute(Add(f"nodes/{name}/beat", 1), store.store)
        supervisor._check_neighbours()
    assert not lost
    assert 0 < len(store.calls) <= HOUR, store.calls[:20]
