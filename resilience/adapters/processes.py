"""Other processes: are they alive, what do they do, how did they end.

A process is held by its pidfd, so that a recycled pid is never signalled. A monitor is no parent of its
rank and cannot wait for it. How the rank ended stands in /proc from the moment it begins to exit until
its parent reaps it, for whoever is the same user; later the pidfd itself tells, from Linux 6.15 on."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import struct
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from resilience.core import encoding
from resilience.core.attribution import Exit

EXIT_POLL = 0.001  # seconds between looks at a dying process
_GENERATIONS = 64  # that are looked through for an ancestor
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PF_EXITING = 0x4  # include/linux/sched.h; set before the exit status is, which is set before memory goes
_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes), include/uapi/linux/pidfd.h
_PIDFD_INFO_EXIT = 1 << 3
_PR_SET_CHILD_SUBREAPER = 36  # include/uapi/linux/prctl.h
_CGROUPS = Path("/sys/fs/cgroup")


MEANT_FOR_A_JOB = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that a terminal, a scheduler or a user sends to all processes of a job, a monitor among them."""


@contextmanager
def job_signals_blocked() -> Iterator[None]:
    """Block the signals that are meant for a job, in this thread. A process started in the body begins with them
    blocked, too, until it calls `ignore_job_signals`: none can end it before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, MEANT_FOR_A_JOB)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_job_signals() -> None:
    """Ignore from now on the signals that are meant for a job."""
    for number in MEANT_FOR_A_JOB:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, MEANT_FOR_A_JOB)


class ProcessState(msgspec.Struct, frozen=True):
    """What /proc tells of a process. state: R S D T Z …; cpu_s: user and system time used; start_time:
    clock ticks after boot, which together with the pid names a process for good; wait_status: how it
    ends, as wait() reports it, None until it does; parent: its pid."""

    state: str
    cpu_s: float
    rss_bytes: int
    threads: int
    start_time: int
    wait_status: int | None
    parent: int = 0


def state(pid: int) -> ProcessState | None:
    """Return the state of a process, None if there is none."""
    try:
        text = encoding.text(Path(f"/proc/{pid}/stat").read_bytes())
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold blanks and brackets
    return ProcessState(
        state=fields[0],
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
        rss_bytes=int(fields[21]) * _PAGE,
        threads=int(fields[17]),
        start_time=int(fields[19]),
        wait_status=int(fields[49]) if int(fields[6]) & _PF_EXITING else None,
        parent=int(fields[1]),
    )


class Process:
    """A process of somebody else, held by its pidfd."""

    def __init__(self, pid: int) -> None:
        """Raises: ProcessLookupError if there is no such process."""
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        seen = state(pid)
        self._start_time = None if seen is None else seen.start_time

    def send(self, number: int) -> bool:
        """Send a signal; answers whether the process was still there."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def state(self) -> ProcessState | None:
        """Return the state of this process, None once it is reaped, whoever has its pid then."""
        seen = state(self.pid)
        return seen if seen is not None and seen.start_time == self._start_time else None

    def has_ended(self, wait: float = 0.0) -> bool:
        """Wait at most `wait` seconds for the process to end; answers whether it has."""
        poll = select.poll()  # select() cannot take a descriptor above 1023
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(wait * 1000))

    def exit_status(self, limit: float) -> Exit:
        """Return how the process ended, as far as it can be seen within `limit` seconds.

        A process that was reaped before anyone looked leaves nothing before Linux 6.15: both fields are
        None then."""
        deadline = time.monotonic() + limit
        while True:
            seen = self.state()
            if seen is None:
                status = self._status_of_reaped()
                return Exit() if status is None else to_exit(status)
            if seen.wait_status is not None:
                return to_exit(seen.wait_status)
            if time.monotonic() >= deadline:
                return Exit()
            time.sleep(EXIT_POLL)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.pidfd)

    def _status_of_reaped(self) -> int | None:
        info = bytearray(struct.pack("=Q56x", _PIDFD_INFO_EXIT))
        try:
            fcntl.ioctl(self.pidfd, _PIDFD_GET_INFO, info)
        except OSError:
            return None
        mask, status = struct.unpack("=Q52xi", info)
        return status if mask & _PIDFD_INFO_EXIT else None


def is_asleep(pid: int) -> bool:
    """Whether no thread of a process runs or would if it had a processor; True of a process that is gone."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return True
    return not any(_is_runnable(pid, thread) for thread in threads)


def _is_runnable(pid: int, thread: str) -> bool:
    try:
        line = Path(f"/proc/{pid}/task/{thread}/stat").read_bytes()
    except OSError:
        return False
    return line[line.rindex(b")") :].startswith(b") R")


def identity_of(pid: int) -> tuple[int, int]:
    """Return (pid, start time), which no later process repeats."""
    seen = state(pid)
    return pid, 0 if seen is None else seen.start_time


def is_alive(identity: tuple[int, int]) -> bool:
    """Whether the main thread of a process has not ended. `await_end` also waits for its other threads."""
    seen = state(identity[0])
    return seen is not None and seen.start_time == identity[1] and seen.state not in "ZX"


def await_end(identity: tuple[int, int], limit: float) -> bool:
    """Wait until a process has ended, at most `limit` seconds; return whether it has. Reaps it if it is a child.

    It has ended when all its threads have: until then its files and ports are open. What /proc says of the process is
    the state of its main thread, and that may have ended before."""
    try:
        process = Process(identity[0])
    except ProcessLookupError:
        return True
    try:
        seen = state(identity[0])
        is_it = seen is not None and seen.start_time == identity[1]
        if is_it and not process.has_ended(max(0.0, limit)):
            return False
    finally:
        process.close()
    with contextlib.suppress(ChildProcessError):  # nearly always it is somebody else's
        os.waitpid(identity[0], os.WNOHANG)
    return True


def kill(identity: tuple[int, int]) -> None:
    """Kill a process, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        process = Process(identity[0])
        if is_alive(identity):
            process.send(signal.SIGKILL)
        process.close()


def waits_in(pid: int) -> str:
    """Return the kernel's function in which the main thread of a process sleeps, empty if it runs or that is
    not told."""
    try:
        name = encoding.text(Path(f"/proc/{pid}/task/{pid}/wchan").read_bytes())
    except OSError:
        return ""
    return "" if name == "0" else name


def become_subreaper() -> None:
    """Be the parent of what descendants leave behind: its exit statuses are for this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def continue_if_stopped(child: int) -> bool:
    """Continue a child of this process that has been stopped since the last call; return whether it had been."""
    try:
        is_stopped = os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG) is not None
        if is_stopped:
            os.kill(child, signal.SIGCONT)
    except (ChildProcessError, ProcessLookupError):
        return False
    return is_stopped


def reap_strangers(known: Container[int]) -> list[int]:
    """Take the exit statuses of children that this process has adopted and that nobody else here waits for, so
    that they do not stay as zombies; answers their pids. known: whom somebody waits for; what has ended behind
    one of these is taken at a later look, once that is collected."""
    reaped: list[int] = []
    while True:
        try:
            seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if seen is None or seen.si_pid in known:
                return reaped
            os.waitpid(seen.si_pid, os.WNOHANG)
        except ChildProcessError:
            return reaped
        reaped.append(seen.si_pid)


def to_exit(status: int) -> Exit:
    """Take a wait status apart."""
    number = status & 0x7F
    if not number:
        return Exit(code=status >> 8)
    try:
        return Exit(signal=signal.Signals(number).name)
    except ValueError:
        return Exit(signal=f"signal {number}")


def is_descendant(pid: int, ancestor: int) -> bool:
    """Whether a process was started by another one, or by one that was and still lives, and so on."""
    for _ in range(_GENERATIONS):
        if pid == ancestor:
            return True
        seen = state(pid)
        if seen is None or seen.parent <= 1:
            return False
        pid = seen.parent
    return False


def oom_kills() -> int | None:
    """Return how many processes of this cgroup the kernel has killed for memory, None if unknown."""
    try:
        memberships = os.fsdecode(Path("/proc/self/cgroup").read_bytes())
    except OSError:
        return None
    for file in memory_files(memberships):
        try:
            lines = encoding.text(file.read_bytes()).splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def memory_files(memberships: str) -> list[Path]:
    """Return where the count may stand for what /proc/self/cgroup says, best place first.

    In a container the path in there may be the host's, while the container's own group is mounted as
    the root; so the root is looked at too."""
    files = []
    for line in memberships.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, name = _CGROUPS, "memory.events"
        elif "memory" in controllers.split(","):
            root, name = _CGROUPS / "memory", "memory.oom_control"
        else:
            continue
        files += [root / path.lstrip("/") / name, root / name]
    return files
