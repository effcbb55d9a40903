"""The wait for a key survives what the host refuses, and is silent."""

from __future__ import annotations

import queue
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from resilience.launcher.rendezvous import key_watch
from resilience.launcher.rendezvous.key_watch import KeyWatch


def test_watch_that_got_no_thread_starts_one_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))
    store.set("key", "1")
    watch = KeyWatch(lambda: store)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", no_thread)
        assert not watch.has("key")
    assert watch.wait("key", 60.0, lambda: False)
    watch.close()


@pytest.mark.parametrize("has_server", [True, False])
def test_one_wait_lasts_a_day_where_torch_prints_two_lines_for_each_that_times_out(
    monkeypatch: pytest.MonkeyPatch, has_server: bool
) -> None:
    """The kernel probes a connection that is idle for so long (`system.patience`)."""
    chunks: queue.SimpleQueue[float] = queue.SimpleQueue()
    connections = [SimpleNamespace()] if has_server else []

    def wait(client: object, key: str, limit: float, chunk: float) -> bool:
        chunks.put(chunk)
        return True

    monkeypatch.setattr(key_watch, "wait", wait)
    monkeypatch.setattr(key_watch.patience, "connect", lambda connect: (connect(), connections))
    watch = KeyWatch(object)
    assert watch.wait("key", 60.0, lambda: False)
    assert chunks.get(timeout=60.0) == (86400.0 if has_server else 60.0)
    watch.close()


def test_no_thread_is_left_in_a_wait_when_the_store_is_about_to_end() -> None:
    """A wait that fails in C++ while the interpreter ends aborts the process, and torch prints a stack."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watch = KeyWatch(lambda: dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False))
    before = set(threading.enumerate())
    assert not watch.has("first")
    assert not watch.wait("second", 0.5, lambda: False)
    waiting = set(threading.enumerate()) - before
    assert len(waiting) == 2
    server.set("first", "1")
    watch.close(ends_store=True)
    assert not any(thread.is_alive() for thread in waiting)
