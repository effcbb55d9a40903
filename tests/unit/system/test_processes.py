"""What is read from the kernel's words about processes."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import resource
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, ModuleType

import pytest

from resilience.facts.interruptions import Exit
from resilience.system import exit_signals, processes
from resilience.system.processes import Runnable, memory_files, runnable, to_exit


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0, Exit(code=0)),
        (7 << 8, Exit(code=7)),
        (signal.SIGKILL, Exit(signal="SIGKILL")),
        (signal.SIGSEGV | 0x80, Exit(signal="SIGSEGV")),  # with a core dump
        (64, Exit(signal="SIGRTMAX")),
        (60, Exit(signal="signal 60")),
    ],
)
def test_wait_status_is_taken_apart(status: int, expected: Exit) -> None:
    assert to_exit(status) == expected


def test_stranger_that_ended_behind_a_known_child_is_reaped() -> None:
    class AllBut:
        """The pids of all children that other code waits for."""

        def __contains__(self, pid: object) -> bool:
            return pid != stranger

    first, stranger = (os.posix_spawnp("true", ["true"], os.environ) for _ in range(2))
    for pid in (first, stranger):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert processes.reap_strangers(AllBut()) == [stranger]
    assert os.waitpid(first, 0) == (first, 0)


def test_process_without_a_descriptor_to_spare_leaves_strangers_for_later() -> None:
    known = os.posix_spawnp("true", ["true"], os.environ)
    os.waitid(os.P_PID, known, os.WEXITED | os.WNOWAIT)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert processes.reap_strangers(range(1 << 22)) == []  # all pids: earlier tests may have left children
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.waitpid(known, 0)


@pytest.mark.parametrize(
    ("memberships", "expected"),
    [
        ("0::/user.slice/a", ["user.slice/a/memory.events", "memory.events"]),
        (
            "9:name=systemd:/x\n4:memory:/job\n0::/\n",
            ["memory/job/memory.oom_control", "memory/memory.oom_control", "memory.events", "memory.events"],
        ),
        ("3:cpu,memory:/a:b\n", ["memory/a:b/memory.oom_control", "memory/memory.oom_control"]),
        ("", []),
    ],
)
def test_count_of_kills_for_memory_is_looked_for_where_either_kind_of_cgroup_keeps_it(
    memberships: str, expected: list[str]
) -> None:
    assert [str(file) for file in memory_files(memberships)] == [f"/sys/fs/cgroup/{path}" for path in expected]


@pytest.mark.parametrize(
    ("then", "now", "is_runnable", "expected"),
    [
        (Runnable(5.0, 7), Runnable(5.0, 7), False, 0.0),  # it slept all the time
        (Runnable(5.0, 7), Runnable(5.2, 9), False, 0.2),
        (Runnable(5.0, 7), Runnable(5.2, 9), True, 0.2),
        (Runnable(5.0, 7), Runnable(5.0, 7), True, 0.5),  # others had the processors: its wait is counted at its end
        (Runnable(5.0, 7), Runnable(9.0, 8), True, 0.5),  # a wait that began before the first look
    ],
)
def test_time_on_a_processor_or_waiting_for_one(
    then: Runnable, now: Runnable, is_runnable: bool, expected: float
) -> None:
    assert now.since(then, 0.5, is_runnable) == pytest.approx(expected)


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="this kernel has no /proc/PID/schedstat")
def test_this_thread_has_run_and_an_ended_process_is_not_counted() -> None:
    first = runnable(os.getpid())
    second = runnable(os.getpid())
    assert first is not None and second is not None
    assert second.turns >= first.turns >= 1
    assert second.seconds >= first.seconds > 0
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert runnable(child) is None


def test_process_whose_state_cannot_be_read_is_not_taken_for_an_ended_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    namespace = processes.pid_namespace()
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OSError, match="Too many open files"):
        processes.identity_of(os.getpid())
    assert processes.pid_namespace() == namespace != ""


@pytest.mark.parametrize("error", [errno.EPERM, errno.EACCES])
def test_process_that_may_not_be_seen_is_nobodys_descendant(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """As with /proc mounted with hidepid=1, if it belongs to another user."""

    def fail(_: Path) -> bytes:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Path, "read_bytes", fail)
    assert not processes.is_descendant(os.getpid(), os.getppid())


def test_process_whose_parent_cannot_be_read_now_may_be_a_descendant(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OSError, match="Too many open files"):
        processes.is_descendant(os.getpid(), os.getppid())


@pytest.mark.parametrize(
    ("module", "name", "blocked"),
    [
        (processes, "MEANT_FOR_A_JOB", processes.job_signals_blocked),
        (exit_signals, "ENDING_SIGNALS", exit_signals.signals_deferred),
    ],
)
def test_signals_do_not_stay_blocked_if_the_handler_of_an_earlier_one_raises(
    module: ModuleType, name: str, blocked: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal arrives just before it is blocked: Python calls its handler in the call that blocks it."""

    def ended(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    mask, handler = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.signal(signal.SIGTERM, ended)
    arrives = filter(ctypes.CDLL(None)["raise"], [signal.SIGTERM])  # sends it, and yields nothing
    monkeypatch.setattr(module, name, itertools.chain(arrives, getattr(module, name)))
    try:
        with pytest.raises(KeyboardInterrupt), blocked():
            pass
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGTERM, handler)
