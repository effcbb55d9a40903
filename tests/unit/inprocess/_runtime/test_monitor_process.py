"""When may the monitor be forked from this process?"""

from __future__ import annotations

import threading

import pytest

from resilience.inprocess._runtime import monitor_process
from resilience.system import native_threads


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
    assert monitor_process.why_not_fork() == reason
