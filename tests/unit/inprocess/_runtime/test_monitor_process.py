"""When may the monitor be forked from this process, and what ends the thread that listens to it?"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from unittest import mock

import pytest

from resilience.errors import StoreError
from resilience.inprocess._runtime import fork_safety, monitor_process
from resilience.monitor import messages
from resilience.system import native_threads, processes
from resilience.system.channel import pair
from resilience.telemetry import standard

LIMIT = 60.0  # seconds


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("python", ""),  # OpenBLAS's
        ("grpc_global_tim", "the process has native threads: grpc_global_tim"),
    ],
)
def test_native_threads_prevent_a_fork_if_they_may_hold_a_lock(
    monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])
    monkeypatch.setattr(native_threads, "process_name", lambda: "python")
    monkeypatch.setattr(native_threads, "others", lambda known: [name])
    assert fork_safety.why_not_fork() == reason


def test_line_that_cannot_be_shown_does_not_end_the_thread_that_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard, "show", mock.Mock(side_effect=TypeError("an odd stream")))
    ours, theirs = pair()
    handle = monitor_process.Handle(os.getpid(), "forked", "", 0.0, mock.Mock(), ours)
    theirs.send(messages.encode(messages.TerminalLine("restart 1")))
    assert handle.is_alive(LIMIT)
    standard.show.assert_called_once_with("restart 1")  # type: ignore[attr-defined]
    theirs.close()
    assert not handle.is_alive(LIMIT)
    ours.close()


@pytest.fixture
def serving() -> Iterator[tuple[int, int]]:
    """A process that goes on until it is ended, as a monitor of an earlier call."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    yield processes.identity_of(process.pid)
    process.kill()
    process.communicate()


def test_monitor_is_not_ended_that_may_host_the_store_of_ranks_that_continue(
    serving: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_process, "_leaving", [(serving, False)])
    monitor_process.await_earlier(0.0)  # of a rank that hosts nothing
    message = f"other ranks continue: process {serving[0]} has hosted their store for 0.05 s since"
    with pytest.raises(StoreError, match=message):
        monitor_process.await_earlier(0.05)
    assert not processes.await_end(serving, 0.0)


def test_monitor_of_a_completed_call_is_ended_for_the_next_host(
    serving: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_process, "_leaving", [(serving, True)])
    monitor_process.await_earlier(0.05)
    assert processes.await_end(serving, LIMIT)
