"""Store operations on a store that answers in an unusual way."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import pytest
import torch.distributed as dist

from resilience.core.restart import Add, Assign, Operation, Read, RunStage, Set, Settle
from resilience.errors import StoreError
from resilience.system.store import _PERFORM, _has_server, execute, wait

NOT_OF_STORE = {Assign, RunStage, Settle}
"""The shell performs them; `test_match_of_a_message_or_an_operation_names_each_kind` holds that it names each."""


def test_store_performs_every_operation_of_the_protocol_but_those_of_the_shell() -> None:
    """Also each operation that says more than its base class: the type is looked up exactly."""
    operations = set(get_args(Operation))
    operations |= {kind for operation in operations for kind in operation.__subclasses__()}
    assert len(operations) > len(get_args(Operation))
    assert set(_PERFORM) == operations - NOT_OF_STORE


class StoreBesideATracer:
    """While it answers, another thread takes a list of all objects, as a memory tracer does."""

    def __init__(self) -> None:
        self.traced: list[Any] = []

    def check(self, keys: list[str]) -> bool:
        self.traced.append(gc.get_objects())
        return True

    def get(self, key: str) -> bytes:
        return key.encode()


def test_values_are_read_while_a_memory_tracer_holds_every_object() -> None:
    assert execute(Read(("a", "b")), StoreBesideATracer()) == ("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["memory", "file", "server"])
def test_read_of_an_absent_key_answers_none_and_writes_nothing(kind: str, tmp_path: Path) -> None:
    kinds = {
        "memory": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store")),
        "server": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }
    store: Any = kinds[kind]()
    execute(Set("there", "1"), store)
    execute(Set("empty", ""), store)
    assert execute(Read(("there", "absent")), store) == ("1", None)
    assert execute(Read(("there", "empty", "absent")), store) == ("1", "", None)
    assert execute(Read(("there", "empty", "there")), store) == ("1", "", "1")
    assert not store.check(["absent"])


def test_read_wakes_nobody_who_waits_for_the_key() -> None:
    """A compare_set that fails would, in TCPStore: then a wait ends, and the key is not there."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waiting = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (waiting.wait(["awaited"], timedelta(seconds=280)), ended.set()))
    thread.start()
    for _ in range(200):
        assert execute(Read(("awaited",)), server) == (None,)
        assert execute(Read(("awaited", "other", "third")), server) == (None, None, None)
        assert not ended.wait(0.005)
    execute(Set("awaited", "1"), server)
    thread.join(60)
    assert ended.is_set()


class DeletedByOther(dist.TCPStore):  # type: ignore[misc]
    """A client whose key `gone` another client deletes right after each check."""

    other: dist.TCPStore

    def check(self, keys: list[str]) -> bool:
        found = super().check(keys)
        self.other.delete_key("gone")
        return bool(found)


@pytest.mark.parametrize("keys", [("gone",), ("there", "gone"), ("there", "gone", "empty")])
def test_key_that_another_client_deletes_while_it_is_read_is_absent(keys: tuple[str, ...]) -> None:
    """TCPStore waits for such a key, and so an agent's read of an old membership once ended a running job's store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = DeletedByOther("127.0.0.1", server.port, wait_for_workers=False, timeout=timedelta(seconds=2))
    client.other = server
    values = {"there": "1", "gone": "2", "empty": ""}
    for key, value in values.items():
        execute(Set(key, value), client)
    expected = tuple(None if key == "gone" else values[key] for key in keys)
    assert execute(Read(keys), client) == expected


def test_store_with_a_server_is_known_behind_its_prefixes(tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert _has_server(dist.PrefixStore("a", dist.PrefixStore("b", server)))
    assert not _has_server(dist.PrefixStore("a", dist.HashStore()))
    assert not _has_server(StoreBesideATracer())


class Unanswering:
    """A store whose waits run out at once, until it has had so many of them."""

    def __init__(self, waits: int) -> None:
        self.left = waits
        self.timeouts: list[timedelta] = []

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.timeouts.append(timeout)
        self.left -= 1
        if self.left:
            raise dist.DistStoreError("the wait ran out")

    def check(self, keys: list[str]) -> bool:
        return False


def test_no_single_wait_is_longer_than_a_chunk() -> None:
    store = Unanswering(waits=5)
    assert wait(store, "key", limit=600.0, chunk=29.5)  # type: ignore[arg-type]
    assert store.timeouts == [timedelta(seconds=29.5)] * 5


def test_key_that_vanishes_within_an_operation_is_a_lost_store() -> None:
    class Vanishing:
        def add(self, key: str, amount: int) -> int:
            raise LookupError(f"{key} was deleted while it was read")

    with pytest.raises(StoreError):
        execute(Add("count", 1), Vanishing())  # type: ignore[arg-type]
