"""What follows if a node cannot open the store of its next cycle, and what does opening one ask of the name service?"""

from __future__ import annotations

import contextlib
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from resilience.core.cycle import CycleDecision
from resilience.errors import LaunchError, StoreError
from resilience.launcher.agent import Agent
from resilience.launcher.rendezvous import stores
from resilience.launcher.rendezvous.handler import Handler


class Stores:
    """A store process that opens no server."""

    def __init__(self, is_alive: bool) -> None:
        self.is_alive = is_alive

    def take(self) -> Any:
        raise StoreError("the store process (pid 5) did not answer within 30 s", pid=5)


def handler(is_host: bool, is_alive: bool = True) -> Any:
    made: Any = Handler.__new__(Handler)
    made._stores = Stores(is_alive)
    made._rendezvous_store = SimpleNamespace(is_host=is_host)
    made._replace_stores = lambda: None
    made._cycle_store_port = None
    return made


@pytest.mark.parametrize("is_host", [True, False])
def test_node_that_cannot_open_a_cycles_store_is_unhealthy_and_the_jobs_store_is_not_lost(is_host: bool) -> None:
    with pytest.raises(LaunchError, match=r"no store for the next cycle .* did not answer within 30 s") as caught:
        handler(is_host)._take_port()
    assert "is lost" not in str(caught.value)


def test_jobs_store_is_lost_with_the_process_that_hosts_it() -> None:
    with pytest.raises(StoreError):
        handler(is_host=True, is_alive=False)._take_port()


def test_node_that_cannot_open_a_cycles_store_is_excluded() -> None:
    agent: Any = Agent.__new__(Agent)
    agent._worker_group = None
    agent._rendezvous = lambda group: handler(is_host=True)._take_port()
    agent._supervisor = SimpleNamespace(
        reporter=SimpleNamespace(cycle=lambda number: None, phase=lambda name: contextlib.nullcontext()),
        handler=SimpleNamespace(cycle=0),
        run_preflight=lambda: None,
        unhealthy=lambda why: CycleDecision("excluded", "a", exit_code=95, detail=why),
        cut_off=lambda why: CycleDecision("failed", "a", exit_code=1, detail=why),
    )
    assert agent._cycle("first").outcome == "excluded"


@pytest.mark.parametrize("is_found", [True, False])
def test_name_that_was_found_is_looked_up_once_for_all_stores_of_a_node(
    monkeypatch: pytest.MonkeyPatch, is_found: bool
) -> None:
    lookups: list[str] = []
    find = socket.getaddrinfo

    def look_up(host: str, *args: Any, **more: Any) -> Any:
        if host != "node0":
            return find(host, *args, **more)
        lookups.append(host)
        if not is_found:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return find("127.0.0.2", *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    servers: dict[int, Any] = {}
    known: dict[str, str] = {}
    for _ in range(2):
        assert stores._open(servers, known, "node0", 0).error == ""
    assert (len(lookups) == 1, bool(known)) == (is_found, is_found)
