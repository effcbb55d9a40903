"""Threads where a host or process has none left."""

from __future__ import annotations

import threading

import pytest

from resilience.system import call_with_timeout

START = threading.Thread.start


def test_thread_that_is_refused_for_a_moment_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = [True, True]

    def start(thread: threading.Thread) -> None:
        if refusals:
            refusals.pop()
            raise RuntimeError("can't start new thread")
        START(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(call_with_timeout, "PAUSE", 0.0)
    monkeypatch.setattr(call_with_timeout, "START_LIMIT", 60.0)
    called = threading.Event()
    assert call_with_timeout.returns_within(60.0, called.set, "test")
    assert called.is_set()
    assert not refusals


def test_thread_that_is_refused_for_long_is_the_callers_concern(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(call_with_timeout, "START_LIMIT", 0.0)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        call_with_timeout.start(threading.Thread)
