"""The data loader workers of a dead rank end even if the host has no thread left."""

from __future__ import annotations

import os
import threading

import pytest

from resilience.adapters import processes
from resilience.monitor import loader_workers
from resilience.monitor.loader_workers import LoaderWorkers


def test_workers_end_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monkeypatch.setattr(processes, "children", lambda pid: [7])
    monkeypatch.setattr(processes, "identity_of", lambda pid: (pid, 1))
    monkeypatch.setattr(processes, "await_end", lambda identity, limit: False)
    monkeypatch.setattr(processes, "kill", killed.append)
    monkeypatch.setattr(loader_workers, "_is_worker", lambda identity: True)
    workers = LoaderWorkers()
    workers.look(6)
    reported: list[tuple[int, ...]] = []
    workers.outlived(processes.Process(os.getpid()), None, reported.append)
    assert not workers.is_waiting
    workers.finish(0.0)
    assert (killed, reported) == ([(7, 1)], [(7,)])
