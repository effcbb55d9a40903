"""The wait for a key survives what the host refuses, and is silent."""

from __future__ import annotations

import queue
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

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


def test_one_wait_lasts_a_day_because_torch_prints_two_lines_for_each_that_times_out() -> None:
    waits: queue.SimpleQueue[timedelta] = queue.SimpleQueue()
    is_written = threading.Event()

    def wait(keys: list[str], timeout: timedelta) -> None:
        waits.put(timeout)
        assert is_written.wait(60.0)

    watch = KeyWatch(lambda: SimpleNamespace(wait=wait, check=lambda keys: True))
    assert not watch.has("key")
    assert waits.get(timeout=60.0) > timedelta(hours=23)
    is_written.set()
    assert watch.wait("key", 60.0, lambda: False)
    watch.close()
