"""The data loader workers of a dead rank end, and nobody else's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from resilience.monitor import loader_workers
from resilience.monitor.loader_workers import LoaderWorkers
from resilience.system import processes


def test_workers_end_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monkeypatch.setattr(processes, "children", lambda pid: [7])
    monkeypatch.setattr(processes, "identity_of", lambda pid: (pid, 1))
    monkeypatch.setattr(processes, "await_end", lambda identity, limit: False)
    monkeypatch.setattr(processes, "kill", killed.append)
    monkeypatch.setattr(loader_workers, "_is_orphan", lambda identity, others: True)
    workers = LoaderWorkers()
    workers.look(6)
    reported: list[tuple[int, ...]] = []
    workers.outlived(processes.Process(os.getpid()), None, reported.append)
    assert not workers.is_waiting
    workers.finish(0.0)
    assert (killed, reported) == ([(7, 1)], [(7,)])


WORKER_OF_A_CHILD = """
import os, signal, sys
os.set_inheritable(int(sys.argv[1]), False)  # a forked child has it, another program has not
with open("/proc/self/comm", "w") as name:
    name.write("evaluation")
worker = os.fork()
if worker == 0:
    with open("/proc/self/comm", "w") as name:
        name.write("pt_data_worker")
    os.write(1, f"{os.getpid()}\\n".encode())
signal.pause()
"""


def test_workers_of_a_child_that_outlives_the_rank_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_workers, "GRACE", 3600.0)  # only `finish` ends workers
    dump = os.memfd_create("dump")
    command = [sys.executable, "-c", WORKER_OF_A_CHILD, str(dump)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[dump], start_new_session=True)
    assert child.stdout is not None
    worker = processes.identity_of(int(child.stdout.readline()))
    reported: list[tuple[int, ...]] = []
    try:
        assert set(processes.OpenFile.of(dump).holders()) == {child.pid, worker[0]}
        workers = LoaderWorkers()
        workers.outlived(processes.Process(os.getpid()), dump, reported.append)
        workers.finish(0.0)
        assert (processes.is_alive(worker), reported) == (True, [])
        child.kill()
        child.wait()
        workers.finish(0.0)
        assert processes.await_end(worker, 60.0)
        assert reported == [(worker[0],)]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        os.close(dump)
