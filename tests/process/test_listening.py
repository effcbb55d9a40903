"""On which addresses do our processes listen?  Of a job on one node, on loopback only."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from resilience.facts import events
from resilience.system.listening_sockets import (
    NEIGHBOURS,
    address_of,
    are_next_free,
    listen,
    listen_beside_free_ports,
)
from tests.process.launching import Launched, launcher
from tests.process.leftovers import processes_of
from tests.support.ranks import Job

Start = Callable[..., Job]
ELSEWHERE = "192.0.2.1"  # of no host (RFC 5737)

WRAPPED = """
from resilience.inprocess import CallWrapper, Wrapper
import torch, torch.distributed as dist

@Wrapper()
def train(call: CallWrapper):
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    (here / f"inside.{rank}").touch()
    await_file("go")
    dist.destroy_process_group()

train()
"""


def listening(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the addresses on which any of these processes listens."""
    return {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def are_loopback(addresses: set[str]) -> bool:
    return bool(addresses) and all(ipaddress.ip_address(address).is_loopback for address in addresses)


# -- a job on one node ---------------------------------------------------------------------------


def test_job_in_a_plain_environment_listens_on_loopback_only(start: Start) -> None:
    job = start(2, "tests.process.jobs:wait_for_sign")
    for rank in range(2):
        job.await_record(events.StageStarted, rank=rank, where=lambda event: event.stage == "run")
    job.await_record(events.StoreHosted, rank=0)
    ours = [psutil.Process(pid) for rank in range(2) for pid in (job.pids[rank], job.monitor_pid(rank))]
    assert are_loopback(listening(ours))
    (job.folder / "go").touch()
    assert [rank.value for rank in job.wait()] == [0, 0]


def test_job_under_torchrun_listens_on_loopback_only(tmp_path: Path) -> None:
    """The agent's store is torch's own; what the ranks and their monitors open is ours."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, time\nrank = os.environ['RANK']\nhere = pathlib.Path(__file__).parent\n"
        "def await_file(name):\n    while not (here / name).exists(): time.sleep(0.01)\n" + WRAPPED
    )
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    env = dict(os.environ, RESILIENCE_RUN_DIR=str(runs), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    output = (tmp_path / "output").open("w+")
    agent = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while not all((tmp_path / f"inside.{rank}").exists() for rank in range(2)):
            assert agent.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.05)
        assert are_loopback(listening(process for process in processes_of(runs) if process.pid != agent.pid))
        (tmp_path / "go").touch()
        assert agent.wait(60) == 0
    finally:
        for process in [*processes_of(runs), agent] if agent.poll() is None else processes_of(runs):
            process.kill()
        agent.wait()
        output.close()


def test_launched_job_listens_on_loopback_only(start: Start, tmp_path: Path) -> None:
    job: Launched = launcher(start, tmp_path)(WRAPPED, agents=1, nproc=2, nodes="1")
    for rank in range(2):
        job.await_worker(f"inside.{rank}")
    agent = psutil.Process(job.job.pids[0])
    assert are_loopback(listening([agent, *agent.children(recursive=True), *processes_of(job.account.folder.parent)]))
    (job.folder / "go").touch()
    assert job.wait() == [0]


# -- which address -------------------------------------------------------------------------------


def own_address() -> str:
    """Return an IPv4 address of this host by which others could come."""
    for interface in psutil.net_if_addrs().values():
        for each in interface:
            if each.family == socket.AF_INET and not ipaddress.ip_address(each.address).is_loopback:
                return str(each.address)
    pytest.skip("THE ADDRESS FOR OTHER HOSTS IS NOT TESTED HERE: this host has only loopback")


def bound_to(host: str) -> str:
    with listen(host, 0) as listener:
        with socket.create_connection((address_of(listener), listener.getsockname()[1]), timeout=10):
            return str(listener.getsockname()[0])


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Give the name "node1" these addresses."""
    real = socket.getaddrinfo

    def name(*addresses: str) -> str:
        def find(host: str, *arguments: Any, **options: Any) -> list[Any]:
            if host != "node1":
                return real(host, *arguments, **options)
            if not addresses:
                raise socket.gaierror(socket.EAI_NONAME, "unknown")
            return [entry for address in addresses for entry in real(address, *arguments, **options)]

        monkeypatch.setattr(socket, "getaddrinfo", find)
        return "node1"

    return name


def test_numeric_address_of_this_host_is_the_one_listened_on() -> None:
    assert bound_to("127.0.0.1") == "127.0.0.1"
    assert bound_to(own_address()) == own_address()


def test_localhost_is_loopback() -> None:
    assert ipaddress.ip_address(bound_to("localhost")).is_loopback


def test_name_with_one_address_is_listened_on_there(named: Callable[..., str]) -> None:
    assert bound_to(named(own_address())) == own_address()


def test_name_that_others_may_know_by_another_address_is_listened_for_on_all(named: Callable[..., str]) -> None:
    assert bound_to(named("127.0.1.1")) == "0.0.0.0"  # as Debian maps a host's own name
    assert bound_to(named("127.0.0.1", ELSEWHERE)) == "0.0.0.0"
    assert bound_to(named()) == "0.0.0.0"
    assert bound_to(named(ELSEWHERE)) == bound_to(ELSEWHERE) == "0.0.0.0"  # address translation


def test_port_that_is_taken_is_an_error_and_not_opened_on_all_addresses() -> None:
    with listen("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", first.getsockname()[1])


def test_port_of_a_store_has_free_neighbours_unless_somebody_takes_them() -> None:
    with listen_beside_free_ports("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        assert are_next_free("127.0.0.1", port)
        with listen("127.0.0.1", port + NEIGHBOURS):
            assert not are_next_free("127.0.0.1", port)
