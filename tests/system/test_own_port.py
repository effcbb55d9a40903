"""A client that waits for its server never sits in the server's place.

The network is one of its own whose only port for clients is the server's port, so the first attempt meets itself."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resilience.system.client_sockets import await_server
from resilience.system.listening_sockets import listen
from tests.support import hosts

PORT = 40000
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # of the network in which the thread is that opens it

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())


def enter_network_with_one_port() -> None:
    hosts.leave_network()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    RANGE.write_text(f"{PORT} {PORT}\n")


def wait_and_listen() -> str:
    try:
        await_server("127.0.0.1", PORT, 0.5)
    except OSError:
        with listen("127.0.0.1", PORT):
            return "the server listens"
    return "found a server"


def test_client_that_meets_itself_goes_on_waiting_and_leaves_the_port_to_the_server() -> None:
    with ThreadPoolExecutor(1) as threads:  # a network namespace is a thread's
        threads.submit(enter_network_with_one_port).result()
        assert threads.submit(wait_and_listen).result() == "the server listens"
