"""A rank that shows by itself that it lives: its end waits for no store, and what kept it from the store is told."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import PIPE
from typing import Any

import torch.distributed as dist

from resilience.facts import events
from resilience.inprocess._runtime.lone_rank import LoneRank
from resilience.inprocess._runtime.supervision import alone_key
from resilience.system.open_sockets import connected
from tests.support.stops import stop

LIMIT = 60.0  # seconds


def await_true(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def lone(base: Any, told: list[events.Event]) -> Iterator[None]:
    """Let a rank show that it lives while the body runs, and end that within END_LIMIT."""
    done = threading.Event()
    rank = LoneRank(base, "call/", "node", 0, 0.06, done, told.append)
    rank.start()
    try:
        yield
    finally:
        done.set()
        rank.end(LIMIT)
    assert all(each.name != "resilience-lone-rank" for each in threading.enumerate())


SERVE = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


@contextmanager
def stopped_host() -> Iterator[dist.TCPStore]:
    """Return a client of a store whose host is stopped while the body runs."""
    with subprocess.Popen([sys.executable, "-c", SERVE], stdin=PIPE, stdout=PIPE, start_new_session=True) as host:
        try:
            assert host.stdout is not None
            client = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), wait_for_workers=False)
            stop(host.pid)
            yield client
        finally:
            host.kill()


def test_call_ends_while_its_lone_rank_waits_for_a_stopped_host() -> None:
    told: list[events.Event] = []
    with stopped_host() as client:
        before = set(connected())
        with lone(client, told):
            await_true(lambda: any(each.port == client.port and each not in before for each in connected()))
        assert set(connected()) <= before
    assert told == []


def test_lone_rank_that_cannot_reach_the_store_says_so_once() -> None:
    told: list[events.Event] = []
    refused, store = 3, dist.HashStore()

    class Base:
        def clone(self) -> dist.Store:
            nonlocal refused
            refused -= 1
            if refused >= 0:
                raise OSError(24, "Too many open files")
            return store

    with lone(Base(), told):
        await_true(lambda: dist.PrefixStore("call/", store).add(alone_key(0), 0) > 0)
    assert told == [events.HookFailed("sign of life", "OSError: [Errno 24] Too many open files")]
