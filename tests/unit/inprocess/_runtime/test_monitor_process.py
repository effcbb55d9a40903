"""When may the monitor be forked from this process, and what ends the thread that listens to it?"""

from __future__ import annotations

import os
import threading
from unittest import mock

import pytest

from resilience.inprocess._runtime import fork_safety, monitor_process
from resilience.monitor import messages
from resilience.system import native_threads
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
