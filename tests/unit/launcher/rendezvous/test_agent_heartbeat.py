"""An agent's counts go on after failures of the store."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

from resilience.errors import StoreError
from resilience.launcher.rendezvous.agent_heartbeat import AgentHeartbeat


def test_heartbeat_goes_on_after_reconnections_that_fail() -> None:
    store: Any = dist.HashStore()
    has_recovered = threading.Event()

    class Failing:
        def __init__(self) -> None:
            self.answers = 1

        def add(self, key: str, amount: int) -> int:
            self.answers -= 1
            if self.answers < 0:
                raise ConnectionResetError("the store is away")
            return int(store.add(key, amount))

    class Recovered:
        def add(self, key: str, amount: int) -> int:
            has_recovered.set()
            return int(store.add(key, amount))

    clients = iter([Failing(), ConnectionRefusedError(), StoreError("not reached"), Recovered()])

    def connect() -> Any:
        client = next(clients)
        if isinstance(client, Exception):
            raise client
        return client

    heartbeat = AgentHeartbeat(connect, "a", 0.001, 3600.0, lambda: None)
    heartbeat.start()
    try:
        assert has_recovered.wait(60.0)
        assert heartbeat.time_left is None
    finally:
        heartbeat.stop()
