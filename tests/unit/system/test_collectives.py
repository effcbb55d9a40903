"""Groups that cannot be dropped cost memory only."""

from __future__ import annotations

import threading

import pytest

from resilience.system import collectives


def test_groups_are_kept_if_no_thread_can_drop_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    group = object()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monkeypatch.setattr(collectives, "_kept", [])
    collectives._release_in_background([group], frozenset())
    assert collectives._kept == [[group]]
    assert collectives.await_drops() == 0
