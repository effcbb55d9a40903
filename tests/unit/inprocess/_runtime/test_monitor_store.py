"""How a monitor publishes the store for an iteration's process groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from resilience.core.restart import NO_SERVER, Keys
from resilience.facts import events
from resilience.inprocess._runtime import monitor_store
from resilience.inprocess._runtime.monitor_store import MonitorStore
from resilience.inprocess.store import Notice

KEY = Keys(1).server


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    monkeypatch.setattr(monitor_store, "local_address", lambda host: "host")
    monkeypatch.setattr(monitor_store, "are_next_free", lambda host, port: True)
    return dist.HashStore()


def host(store: dist.Store) -> list[Any]:
    """Ask a monitor to host the store of iteration 1; return its events."""
    emitted: list[Any] = []
    receiver = MonitorStore(lambda: store, {}, object(), False, Notice("test/"), lambda _: None, emitted.append, print)  # type: ignore[arg-type]
    receiver._call_begin = SimpleNamespace(base_host="host")  # type: ignore[assignment]
    receiver._store = store  # type: ignore[assignment]
    receiver.host(1)
    receiver._tasks.put(None)
    receiver._perform_tasks()
    return emitted


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("address already in use")])
def test_store_of_an_iteration_is_published_although_its_server_did_not_start_at_once(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    errors = [error]

    def server(address: str) -> Any:
        if errors:
            raise errors.pop()
        return SimpleNamespace(host=address, port=10_000)

    monkeypatch.setattr(monitor_store, "iteration_server", server)
    (hosted,) = host(store)
    assert isinstance(hosted, events.StoreHosted)
    assert store.get(KEY) == b"host:10000"


@pytest.mark.parametrize("published", ["rank:9000", NO_SERVER])
def test_first_publication_of_an_iterations_store_stays(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, published: str
) -> None:
    monkeypatch.setattr(monitor_store, "iteration_server", lambda address: SimpleNamespace(host=address, port=10_000))
    store.set(KEY, published)
    assert host(store) == []
    assert store.get(KEY).decode() == published
