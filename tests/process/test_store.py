"""Stores of several processes: whoever hosts, barriers meet, lists are complete, groups are agreed on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resilience.errors import BarrierOverflow, BarrierTimeout, StoreError
from resilience.inprocess.store import TCPStore, hosting
from tests.support.ranks import Job, free_port

RANKS = 8
KINDS = ["tcp", "file", "own"]
LIMIT = timedelta(seconds=60)

Start = Callable[..., Job]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[TCPStore]:
    """A store hosted here, as a monitor would."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with hosting(True):
        yield TCPStore("127.0.0.1", 0)


def values(job: Job) -> list[Any]:
    ended = job.wait_ranks()
    assert [(one.code, one.error) for one in ended] == [(0, "")] * len(ended), job.output()
    return [one.value for one in ended]


def at(server: TCPStore, tmp_path: Path) -> dict[str, str]:
    return {"MASTER_PORT": str(server.port), "STORE_FILE": str(tmp_path / "store")}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_see_what_all_have_written(start: Start, server: TCPStore, tmp_path: Path, kind: str) -> None:
    told = values(start(RANKS, "tests.process.storing:share", env=at(server, tmp_path), kind=kind))
    assert [one["initial"] for one in told] == [RANKS - (rank + 1) % RANKS for rank in range(RANKS)]
    assert {tuple(one["records"]) for one in told} == {tuple(range(RANKS))}
    assert len({tuple(one["order"]) for one in told}) == 1
    assert all(one["terminated"] == {1, 3, 5, 7} for one in told)
    assert {one["left"] for one in told} == {4}
    assert all(one["completed"] for one in told)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_of_a_node_goes_with_its_lost_rank(
    start: Start, server: TCPStore, tmp_path: Path, kind: str
) -> None:
    job = start(RANKS, "tests.process.storing:regroup", at(server, tmp_path), kind=kind, node_size=2, lost=[2, 7])
    told = values(job)
    assert [one["rank"] for one in told] == [0, 1, None, None, 2, 3, None, None]
    assert [one.get("error") for one in told] == [None, None, None, "RankDiscarded", None, None, "RankDiscarded", None]
    assert {one["size"] for one in told if "size" in one} == {4}


@pytest.mark.parametrize("kind", KINDS)
def test_surplus_ranks_are_reported_and_the_others_meet(
    start: Start, server: TCPStore, tmp_path: Path, kind: str
) -> None:
    job = start(RANKS, "tests.process.storing:overflow", at(server, tmp_path), kind=kind, count=RANKS - 2)
    assert sorted(values(job)) == ["BarrierOverflow"] * 2 + ["met"] * (RANKS - 2)


def test_outside_a_wrapper_rank_0_hosts_and_a_second_store_joins(start: Start) -> None:
    told = values(start(4, "tests.process.storing:host_or_join"))
    assert told == [{"critical": (0,), "through": 4}] + [{"critical": (0,), "through": True}] * 3


def test_barrier_of_256_clients_meets(server: TCPStore) -> None:
    count = 256
    clients: list[TCPStore | None] = [None] * count
    results: list[str] = []

    def meet(rank: int) -> None:
        with hosting(False):
            client = clients[rank] = TCPStore("127.0.0.1", server.port)
        for name in ("first", "second"):
            client.barrier(rank, name, count, LIMIT)
        results.append("met")

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT.total_seconds())
    assert results == ["met"] * count
    with pytest.raises(BarrierOverflow):
        server.barrier(count, "second", count, LIMIT)


def test_missing_rank_ends_the_barrier(server: TCPStore) -> None:
    with pytest.raises(BarrierTimeout, match="1 of 2 ranks came"):
        server.barrier(0, "here", 2, timedelta(seconds=0.2), timeout_chunk=timedelta(seconds=0.05))


# -- hosting ------------------------------------------------------------------------------------------


def test_client_of_no_server_gives_up_with_its_address() -> None:
    port = free_port()
    with pytest.raises(StoreError, match=rf"could not reach the store at 127.0.0.1:{port} within 0.1 s") as raised:
        with hosting(False):
            TCPStore("127.0.0.1", port, timeout=timedelta(seconds=0.1))
    assert vars(raised.value)["port"] == port


def test_client_waits_for_a_server_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    began = threading.Event()
    found: list[bytes] = []

    def join() -> None:
        began.set()
        with hosting(False):
            found.append(TCPStore("127.0.0.1", port, timeout=LIMIT).get("key"))

    client = threading.Thread(target=join)
    client.start()
    began.wait()
    with hosting(True):
        server = TCPStore("127.0.0.1", port)
    server.set("key", "value")
    client.join(LIMIT.total_seconds())
    assert found == [b"value"]


def test_monitor_does_not_take_a_stranger_for_its_store(server: TCPStore) -> None:
    with hosting(True), pytest.raises(StoreError, match=r"could not host the store .* in use"):
        TCPStore("127.0.0.1", server.port)


def test_agents_store_is_joined_and_never_hosted(server: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    server.set("who", "agent")
    stores = [TCPStore()]
    with hosting(True):
        stores.append(TCPStore())
    assert [store.get("who") for store in stores] == [b"agent"] * 2
    assert [store.critical_ranks for store in stores] == [()] * 2


def test_hosting_is_decided_in_each_thread_for_itself(server: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    joined: list[tuple[int, ...]] = []
    with hosting(True):  # which would refuse a port that is taken
        thread = threading.Thread(target=lambda: joined.append(TCPStore("127.0.0.1", server.port).critical_ranks))
        thread.start()
        thread.join(LIMIT.total_seconds())
    assert joined == [(0,)]
