"""How an agent starts its workers, and what it does if it cannot watch them."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed.elastic.agent.server.api import Worker
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.timer import FileTimerServer

from resilience.errors import LaunchError
from resilience.launcher.worker.worker_processes import watched as watched_workers
from resilience.launcher.worker.workers import Ordered, start
from resilience.launcher.worker.zygote import ForkedWorker
from resilience.launcher.worker_env import end_file_timers
from tests.process.warming import LIMIT, specification, told
from tests.support.signs import await_true


@pytest.mark.parametrize("configured", [None, "SIGUSR1"])
def test_start_of_workers_changes_no_signal_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: str | None
) -> None:
    if configured is not None:
        monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", configured)
    script = tmp_path / "worker.py"
    script.write_text("")
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        workers = start(specification([str(script)], None, tmp_path / "logs", redirects=Std.NONE))
        after = {number: signal.getsignal(number) for number in signal.valid_signals()}
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
    assert told(workers)["codes"] == [0]
    assert after == before


def test_workers_that_cannot_be_watched_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import time\ntime.sleep(600)")
    context = start(specification([str(script)], None, tmp_path / "logs", 3, redirects=Std.NONE))
    pids = context.pids().values()
    watched: list[int] = []

    def open_one(pid: int) -> int:
        if watched:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        watched.append(os.dup(0))
        return watched[0]

    monkeypatch.setattr(os, "pidfd_open", open_one)
    workers = [Worker(local_rank, local_rank, local_rank, 3, 3) for local_rank in range(3)]
    with pytest.raises(LaunchError, match="Too many open files"):
        watched_workers(context, workers)
    assert not any(map(psutil.pid_exists, pids))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(watched[0])


def test_log_folder_that_is_full_is_why_workers_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spec = specification(["-c", ""], None, tmp_path / "logs")
    monkeypatch.setattr(DefaultLogsSpecs, "reify", fail)
    with pytest.raises(LaunchError, match="No space left on device") as raised:
        start(spec)
    assert isinstance(raised.value.__cause__, OSError)


def test_workers_whose_output_no_thread_can_show_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    started: list[int] = []
    start_cold = Ordered.start_cold

    def note_pid(worker: Ordered, open_files: int | None, pipe: int) -> None:
        start_cold(worker, open_files, pipe)
        started.append(worker.proc.pid)

    script = tmp_path / "worker.py"
    script.write_text("import time\ntime.sleep(600)")
    spec = specification([str(script)], None, tmp_path / "logs", tee=Std.ALL)
    monkeypatch.setattr(Ordered, "start_cold", note_pid)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(LaunchError, match="can't start new thread") as raised:
        start(spec)
    assert isinstance(raised.value.__cause__, OSError)  # so only this node leaves
    assert started and not any(map(psutil.pid_exists, started))


def test_refusal_of_a_program_is_known_however_late_its_process_executes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start does not wait for it: the process stands still until the workers count as started."""
    start_cold = Ordered.start_cold

    def start_stopped(worker: Ordered, open_files: int | None, pipe: int) -> None:
        start_cold(worker, open_files, pipe)
        os.kill(worker.proc.pid, signal.SIGSTOP)

    monkeypatch.setattr(Ordered, "start_cold", start_stopped)
    script = tmp_path / "refused"
    script.write_text("echo here\n")
    script.chmod(0o755)
    workers = start(specification([], None, tmp_path / "logs", entrypoint=str(script), redirects=Std.NONE))
    try:
        process = workers.subprocess_handlers[0].proc
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(LIMIT) == 1
        refusal = workers.refusal()
    finally:
        workers.close(signal.SIGKILL)
    assert isinstance(refusal, LaunchError)
    assert isinstance(refusal.__cause__, OSError)
    assert (refusal.__cause__.errno, refusal.__cause__.filename) == (errno.ENOEXEC, str(script))


def test_file_timers_that_no_worker_used_leave_no_thread(tmp_path: Path) -> None:
    server = FileTimerServer(str(tmp_path / "timers"), "job", max_interval=0.1)
    server.start()
    thread = server._watchdog_thread
    assert thread is not None and thread.ident is not None
    await_true(lambda: sys._current_frames()[thread.ident].f_code.co_name == "_watchdog_loop")  # it waits for a worker
    agent = SimpleNamespace(_worker_watchdog=server)
    end_file_timers(agent)
    thread.join(60)
    assert not thread.is_alive()
    assert agent._worker_watchdog is None
    assert not list(tmp_path.iterdir())


def test_worker_is_waited_for_without_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", fail)
    with subprocess.Popen(["sleep", "600"]) as process:
        worker = ForkedWorker(process.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(0.0)
        worker.send_signal(signal.SIGKILL)
        process.returncode = worker.wait(60.0)  # reaped there
    assert process.returncode == -signal.SIGKILL


def test_cold_worker_gets_the_limit_of_open_files_that_its_launcher_began_with(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE))")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spec = specification([str(script)], None, tmp_path / "logs", open_files=200)
    workers = start(spec)
    answer = told(workers)
    for handler in workers.subprocess_handlers.values():
        handler._stdout.close()
        handler._stderr.close()
    assert answer["out"] == [f"(200, {hard})\n"]
