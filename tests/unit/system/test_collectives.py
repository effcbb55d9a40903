"""When groups are dropped, and what becomes of those that cannot be."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

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


def looks(monkeypatch: pytest.MonkeyPatch, *members: set[tuple[int, int]]) -> list[set[tuple[int, int]]]:
    """Let each look at gloo's sockets find the next of these, and the last one again and again. Return what is left."""
    left = list(members)
    monkeypatch.setattr(collectives, "_find_sockets", lambda: ("epoll", left.pop(0) if len(left) > 1 else left[0]))
    return left


def test_groups_are_dropped_once_gloo_has_read_the_end_of_each_cut_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child that was forked has one of each."""
    monkeypatch.setattr(collectives, "_cut_before", {5, 6})
    left = looks(monkeypatch, {(3, 5), (4, 6), (8, 7)}, {(4, 6), (8, 7)}, {(8, 7)})
    collectives._await_stream_ends(time.monotonic())
    assert left == [{(8, 7)}]


def test_copy_of_a_connection_whose_end_is_not_read_in_time_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(collectives, "_cut_before", {5})
    monkeypatch.setattr(collectives, "_held", {5: reading})
    looks(monkeypatch, {(3, 5)})
    collectives._await_stream_ends(time.monotonic() - collectives.READ_LIMIT)
    with pytest.raises(BrokenPipeError):
        os.write(writing, b"x")
    os.close(writing)
    assert collectives._open_copies() == set()


def test_copy_counts_as_open_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    open_then: list[set[int]] = []
    closes = SimpleNamespace(close=lambda descriptor: open_then.append(collectives._open_copies()))
    monkeypatch.setattr(collectives, "os", closes)
    monkeypatch.setattr(collectives, "_held", {5: 3, 6: 4})
    collectives.let_go()
    assert open_then == [{5, 6}, {6}]
    assert collectives._open_copies() == set()
