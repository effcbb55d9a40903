"""The wait for a key survives what the host refuses."""

from __future__ import annotations

import threading
from datetime import timedelta
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
