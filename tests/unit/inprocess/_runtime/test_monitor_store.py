"""How a monitor publishes the store for an iteration's process groups, and what it does if its work fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from resilience.core.restart import NO_SERVER, Assign, Keys, Unassigned, WaitLimits
from resilience.errors import StoreError, error_in_words
from resilience.facts import events
from resilience.facts.limits import Limit, Limits
from resilience.facts.seats import Seat
from resilience.inprocess._runtime import monitor_store
from resilience.inprocess._runtime.monitor_store import MonitorStore
from resilience.inprocess._runtime.supervision import finished_key
from resilience.inprocess.store import Notice

KEY = Keys(1).server


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    monkeypatch.setattr(monitor_store, "local_address", lambda host: "host")
    monkeypatch.setattr(monitor_store, "are_next_free", lambda host, port: True)
    return dist.HashStore()


def monitor_store_of(store: dist.Store, emitted: list[Any], has_completed: bool = False) -> MonitorStore:
    return MonitorStore(
        lambda: store,
        {},
        object(),  # type: ignore[arg-type]
        False,
        Notice("test/"),
        lambda _: None,
        emitted.append,
        print,
        has_completed=lambda: has_completed,
    )


def host(store: dist.Store) -> list[Any]:
    """Ask a monitor to host the store of iteration 1; return its events."""
    emitted: list[Any] = []
    receiver = monitor_store_of(store, emitted)
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


def test_server_that_cannot_be_made_ahead_of_time_is_no_lost_store(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [SimpleNamespace(host="host", port=10_000)]

    def server(address: str) -> Any:
        if not servers:
            raise OSError(24, "Too many open files")
        return servers.pop()

    monkeypatch.setattr(monitor_store, "iteration_server", server)
    (hosted,) = host(store)
    assert isinstance(hosted, events.StoreHosted)


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), dist.DistNetworkError("address in use")])
def test_store_that_a_monitor_cannot_host_is_on_record_with_the_reason_and_is_no_lost_store(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(monitor_store, "iteration_server", mock.Mock(side_effect=error))
    (failed,) = host(store)
    assert failed == events.HookFailed(
        "hosting", f"the store of iteration 1 could not be hosted: {error_in_words(error)}"
    )
    assert not store.check([KEY])


def test_store_that_a_stand_in_cannot_host_keeps_it_from_no_iteration(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_store, "iteration_server", mock.Mock(side_effect=OSError(24, "Too many open files")))
    following = Seat(1, 0, 1, 1, 1)
    monkeypatch.setattr(monitor_store, "seat_within", lambda *_: following)
    emitted: list[Any] = []
    receiver = monitor_store_of(store, emitted)
    receiver._base_store = receiver._store = store
    origin = SimpleNamespace(world_size=2)
    limits = Limits(hook=Limit(hard=90.0))
    begin: Any = SimpleNamespace(base_host="host", prefix="call/", origin=origin, limits=limits)
    receiver._call_begin = begin
    assert receiver._assign(Assign(Seat(1, 1, 2, 2, 0), (0,))) == following
    assert [type(event) for event in emitted] == [events.HookFailed]


def test_lost_rank_whose_hooks_get_no_store_has_the_place_that_is_left(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    emitted: list[Any] = []
    receiver = monitor_store_of(store, emitted)
    receiver._base_store = receiver._store = store
    begin: Any = SimpleNamespace(
        prefix="call/", origin=SimpleNamespace(world_size=2), limits=Limits(hook=Limit(hard=90.0))
    )
    receiver._call_begin = begin
    monkeypatch.setattr(receiver, "_connect", mock.Mock(side_effect=ValueError("no such host")))
    assert receiver._assign(Assign(Seat(1, 1, 2, 2, 0), (0,))) == Unassigned(2)
    (failed,) = emitted
    assert (failed.hook, "no such host" in failed.error) == ("rank_assignment", True)


@pytest.mark.parametrize("has_completed", [False, True])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StoreError("gone"), events.StoreLost("monitor: StoreError: gone")),
        (dist.DistNetworkError("reset"), events.StoreLost("monitor: DistNetworkError: reset")),
        (OSError(24, "Too many open files"), events.HookFailed("monitor", "OSError: [Errno 24] Too many open files")),
    ],
)
def test_failed_work_of_a_monitor_is_a_lost_store_only_if_a_store_that_is_needed_failed(
    store: dist.Store, error: Exception, expected: events.Event, has_completed: bool
) -> None:
    def work() -> None:
        raise error

    emitted: list[Any] = []
    receiver = monitor_store_of(store, emitted, has_completed)
    for task in (work, None):
        receiver._tasks.put(task)
    receiver._perform_tasks()
    is_harmless = has_completed and isinstance(expected, events.StoreLost)
    assert emitted == ([] if is_harmless else [expected])


def test_monitor_that_could_not_begin_to_watch_still_notes_that_its_rank_has_left(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused:
        def __init__(self, *_: Any) -> None:
            raise RuntimeError("by schedule")

    monkeypatch.setattr(monitor_store, "Supervisor", Refused)
    emitted: list[Any] = []
    receiver = monitor_store_of(store, emitted)
    receiver._base_store = store
    origin = SimpleNamespace(initial_rank=0, node="node", world_size=1)
    begin: Any = SimpleNamespace(origin=origin, prefix="call/", waits=WaitLimits(), heartbeat_timeout=30.0)
    for task in (lambda: receiver._begin(begin), receiver._finish, None):
        receiver._tasks.put(task)
    receiver._perform_tasks()
    assert emitted == [events.HookFailed("monitor", "RuntimeError: by schedule")]
    assert receiver._store.check([finished_key(0)])
    assert receiver._have_all_left()
