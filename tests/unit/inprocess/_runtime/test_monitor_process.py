"""When may the monitor be forked from this process?"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from resilience.inprocess._runtime import monitor_process

GONE = "4194304"  # no thread has this number: it is the kernel's upper bound
OTHER = "1"


@pytest.fixture
def with_thread(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Show one Python thread, the main one, and one more thread of this name."""

    def show(task: str, name: str) -> None:
        monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])
        monkeypatch.setattr(os, "listdir", lambda folder: [str(threading.main_thread().native_id), task])
        if name:
            monkeypatch.setattr(monitor_process, "_comm_of", lambda path: name if path.endswith(task) else "python")

    return show


def test_thread_that_ends_while_threads_are_listed_does_not_prevent_a_fork(
    with_thread: Callable[[str, str], None],
) -> None:
    with_thread(GONE, "")
    assert monitor_process.why_not_fork() == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("iou-wrk-77", ""),  # the kernel's, for an io_uring
        ("python", ""),  # OpenBLAS's
        ("grpc_global_tim", "the process has native threads: grpc_global_tim"),
    ],
)
def test_native_threads_prevent_a_fork_if_they_may_hold_a_lock(
    with_thread: Callable[[str, str], None], name: str, reason: str
) -> None:
    with_thread(OTHER, name)
    assert monitor_process.why_not_fork() == reason
