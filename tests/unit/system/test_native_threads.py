"""Which threads may hold a lock when this process forks?"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from resilience.launcher.rendezvous import stores
from resilience.launcher.worker import preload
from resilience.system import native_threads


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A process with a main thread; the folders of its threads."""
    monkeypatch.setattr(native_threads, "TASKS", tmp_path)
    add(tmp_path, os.getpid(), "python")
    return tmp_path


def add(tasks: Path, task: int, name: str) -> None:
    (tasks / str(task)).mkdir()
    (tasks / str(task) / "comm").write_text(f"{name}\n")


def test_main_thread_and_known_ones_are_no_others(tasks: Path) -> None:
    add(tasks, 1, "grpc")
    add(tasks, 2, "resilience-tick")
    assert native_threads.others(known=[2]) == ["grpc"]
    assert native_threads.process_name() == "python"


@pytest.mark.parametrize("task", ["ended", "of the kernel"])
def test_thread_that_ends_meanwhile_and_the_kernels_own_prevent_no_fork(
    tasks: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    if task == "ended":
        (tasks / "3").mkdir()  # listed, and gone when its name is read
    else:
        add(tasks, 3, "iou-wrk-77")
    assert native_threads.others() == []
    assert preload.cannot_fork() == ""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    assert stores._may_fork()


def test_thread_of_a_library_prevents_a_fork(tasks: Path) -> None:
    add(tasks, 3, "grpc")
    assert preload.cannot_fork() == "2 threads run (grpc, python), and a fork has only one"
    assert not stores._may_fork()
