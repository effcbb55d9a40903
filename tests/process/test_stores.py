"""The store process: serves, survives signals and its clients, and ends with its agent."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from resilience.errors import StoreError
from resilience.launcher.rendezvous.stores import SERVER, StoreProcess
from resilience.system.processes import Process
from tests.process.children import child, hear


@pytest.fixture
def stores() -> Iterator[StoreProcess]:
    """In the test's process, which has threads: so it is executed."""
    started = StoreProcess.start()
    yield started
    started.close()


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, wait_for_workers=False)


def test_servers_are_opened_and_closed_on_request(stores: StoreProcess) -> None:
    one, two = stores.host().port, stores.host().port
    client(one).set("key", "one")
    assert not client(two).check(["key"])
    stores.release(one)
    assert stores.host(port=one).port == one  # it is free again, and empty
    assert not client(one).check(["key"])


def test_server_asked_for_ahead_of_time_is_there_when_it_is_taken(stores: StoreProcess) -> None:
    stores.ask()
    stores.ask()
    assert client(stores.take().port).num_keys() == client(stores.take().port).num_keys()


def test_it_starts_beside_files_with_names_of_pythons_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("queue", "types", "struct"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the program's own')")
    started = StoreProcess.start()
    try:
        assert started.host().port > 0
    finally:
        started.close()


def test_port_that_is_taken_is_reported_and_others_go_on(stores: StoreProcess) -> None:
    port = stores.host().port
    with pytest.raises(StoreError, match="Address already in use"):
        stores.host(port=port)
    client(stores.host().port).set("key", "value")


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_signals_for_the_agent_pass_it_by(stores: StoreProcess, number: int) -> None:
    port = stores.host().port
    os.kill(stores.pid, number)
    assert stores.host().port != port
    client(port).set("key", "value")


def test_it_ends_when_it_is_closed(stores: StoreProcess) -> None:
    process = Process(stores.pid)
    stores.close()
    assert process.has_ended()
    stores.close()


def test_host_raises_a_store_error_after_the_store_process_died(stores: StoreProcess) -> None:
    stores.host()
    os.kill(stores.pid, signal.SIGKILL)
    with pytest.raises(StoreError, match=r"has ended|is gone"):
        stores.host()


def test_it_goes_with_an_agent_that_is_killed() -> None:
    def body(line: Connection) -> None:
        started = StoreProcess.start()
        line.send((started.pid, started.host().port))
        hear(line)

    with child(body) as agent:
        pid, _ = agent.hear()
        process = Process(pid)
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        assert process.has_ended(60.0)


def test_forked_process_starts_at_once_if_a_billion_files_may_be_open() -> None:
    closed = os.closerange
    asked = os.sysconf

    def close_few(first: int, end: int) -> None:
        assert end - first < 1 << 20, "this takes minutes without close_range"
        closed(first, end)

    def body(line: Connection) -> None:
        os.sysconf = lambda name: 1 << 30 if name == "SC_OPEN_MAX" else asked(name)
        os.closerange = close_few
        started = StoreProcess.start()
        line.send((started.is_forked, started.host().port))
        started.close()

    with child(body) as agent:
        is_forked, port = agent.hear()
    assert is_forked and port


def test_server_for_which_descriptors_are_short_is_refused_with_the_limit(stores: StoreProcess) -> None:
    port = stores.host().port
    limit = len(os.listdir(f"/proc/{stores.pid}/fd")) + SERVER - 1
    _, hard = resource.prlimit(stores.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(stores.pid, resource.RLIMIT_NOFILE, (limit, hard))
    with pytest.raises(StoreError, match=rf"needs {SERVER} open files, and {SERVER - 1} of {limit} are left"):
        stores.host()
    resource.prlimit(stores.pid, resource.RLIMIT_NOFILE, (limit + 1, hard))
    client(stores.host().port).set("key", "value")
    client(port).set("key", "value")
