"""Other processes: are they alive, what do they do, how did they end.

A process is held by its pidfd, so that a recycled pid is never signalled. A monitor is not its rank's parent and cannot
wait for it. /proc shows how the rank ended, to the same user, from the start of its exit until its parent reaps it.
After that the pidfd itself shows it, since Linux 6.15."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from resilience.facts import encoding
from resilience.facts.interruptions import Exit, ProcessInfo

EXIT_POLL = 0.001  # seconds between checks of a dying process
_GENERATIONS = 64  # most generations to search for an ancestor
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PF_EXITING = 0x4  # include/linux/sched.h; set before the exit status, which is set before memory is freed
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
"""Signals that a terminal, a scheduler or a user sends to all processes of a job, monitors included."""


@contextmanager
def job_signals_blocked() -> Iterator[None]:
    """Block the signals meant for a job, in this thread. A process started in the body begins with them blocked, until
    it calls `ignore_job_signals`, so none can end it before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, MEANT_FOR_A_JOB)  # calls handlers of earlier signals, which may raise
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_job_signals() -> None:
    """Ignore the signals meant for a job from now on."""
    for number in MEANT_FOR_A_JOB:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, MEANT_FOR_A_JOB)


class ProcessState(msgspec.Struct, frozen=True):
    """The state of a process in /proc. state: R S D T Z …; cpu_s: user and system time used; start_time: clock ticks
    after boot, which together with the pid identify a process forever; wait_status: its exit status as wait() reports
    it, None until the exit; parent: its pid."""

    state: str
    cpu_s: float
    rss_bytes: int
    threads: int
    start_time: int
    wait_status: int | None
    parent: int = 0


def _read_boot_id() -> str:
    try:
        return encoding.text(Path("/proc/sys/kernel/random/boot_id").read_bytes()).strip()
    except OSError:
        return ""


_BOOT_ID = _read_boot_id()  # of the host, the same in all its containers; later no descriptor may be left to read it


def state(pid: int) -> ProcessState | None:
    """Return the state of a process, None if there is none or it cannot be read."""
    try:
        return _read_state(pid)
    except OSError:
        return None


def _read_state(pid: int) -> ProcessState:
    """Raises: FileNotFoundError or ProcessLookupError if there is no such process; other OSErrors if it cannot be read,
    as with too many open files."""
    text = encoding.text(Path(f"/proc/{pid}/stat").read_bytes())
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may contain blanks and brackets
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
    """A process that is not our child, held by its pidfd."""

    def __init__(self, pid: int, pidfd: int | None = None, start_time: int | None = None) -> None:
        """Open the process. pidfd, start_time: of this process, opened while it lived; it may be gone meanwhile, and
        its number may be that of another one. Raises: ProcessLookupError if there is no such process; OSError, as with
        too many open files."""
        self.pid = pid
        self.pidfd = open_pidfd(pid) if pidfd is None else pidfd
        try:
            self.start_time = identity_of(pid)[1] if start_time is None else start_time
        except OSError:  # then `state` could never be sure
            self.close()
            raise

    def send(self, number: int) -> bool:
        """Send a signal. Return True if the process was still there."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def state(self) -> ProcessState | None:
        """Return the state of this process, None once it is reaped, even if its pid is reused, and if it cannot be
        read. `is_reaped` and `has_ended` tell the two apart."""
        present = state(self.pid)
        return present if present is not None and present.start_time == self.start_time else None

    def is_reaped(self) -> bool:
        """Return True once this process is reaped, even if its pid is reused; False if that is unknown."""
        try:
            return _read_state(self.pid).start_time != self.start_time
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:
            return False

    def has_ended(self, wait: float = 0.0) -> bool:
        """Wait at most `wait` seconds for the process to end. Return True if it has."""
        poll = select.poll()  # select() cannot take a descriptor above 1023
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(wait * 1000))

    def exit_status(self, limit: float) -> Exit:
        """Return how the process ended, as far as that shows within `limit` seconds.

        Before Linux 6.15, a process that was reaped before a check leaves nothing: both fields are then None."""
        deadline = time.monotonic() + limit
        while True:
            present = self.state()
            if present is None:
                status = self._status_of_reaped()
                return Exit() if status is None else to_exit(status)
            if present.wait_status is not None:
                return to_exit(present.wait_status)
            if time.monotonic() >= deadline:
                return Exit()
            time.sleep(EXIT_POLL)

    def close(self) -> None:
        """Release the pidfd."""
        os.close(self.pidfd)

    def _status_of_reaped(self) -> int | None:
        info = bytearray(struct.pack("=Q56x", _PIDFD_INFO_EXIT))
        try:
            fcntl.ioctl(self.pidfd, _PIDFD_GET_INFO, info)
        except OSError:
            return None
        mask, status = struct.unpack("=Q52xi", info)
        return status if mask & _PIDFD_INFO_EXIT else None


def open_pidfd(pid: int) -> int:
    """Return a new pidfd. Raises: ProcessLookupError if there is no such process; OSError, as with too many open files.

    If a thread has the number now, the kernel reports ENOENT, older kernels EINVAL."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINVAL):
            raise ProcessLookupError(errno.ESRCH, f"there is no process {pid}") from error
        raise


def children(pid: int) -> tuple[int, ...]:
    """Return the pids of the processes that the main thread of a process has started; () if it is gone or the kernel
    does not tell (CONFIG_PROC_CHILDREN)."""
    try:
        return tuple(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_bytes().split()))
    except OSError:
        return ()


class OpenFile(msgspec.Struct, frozen=True):
    """A file that this process has open, and that others may have open too."""

    link: str  # as /proc shows it
    inode: int

    @classmethod
    def of(cls, fd: int) -> OpenFile:
        """Return the file behind a descriptor. Raises: OSError."""
        return cls(os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_ino)

    def holders(self) -> list[int]:
        """Return the pids of the other processes that have this file open, as far as this process may see that."""
        own = str(os.getpid())
        return [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and pid != own and self._is_in(pid)]

    def _is_in(self, pid: str) -> bool:
        folder = f"/proc/{pid}/fd"
        try:
            return any(self._is(f"{folder}/{fd}") for fd in os.listdir(folder))
        except OSError:  # it has ended, or belongs to somebody else
            return False

    def _is(self, path: str) -> bool:
        try:  # the link first: to stat a file of a dead file server waits for it
            return os.readlink(path) == self.link and os.stat(path).st_ino == self.inode
        except OSError:
            return False


def name(pid: int) -> str:
    """Return the name of the main thread of a process, empty if it is gone."""
    try:
        return encoding.text(Path(f"/proc/{pid}/comm").read_bytes()).rstrip("\n")
    except OSError:
        return ""


def is_asleep(pid: int) -> bool:
    """Return True if no thread of a process runs or waits for a processor, and if the process is gone; False if that is
    unknown, as with too many open files."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return not any(_is_runnable(pid, thread) for thread in threads)


def exit_sample(pid: int) -> tuple[float, int] | None:
    """Return a sample of a killed process: its processor seconds and its memory in bytes. Both change while the kernel
    frees what it holds. None: it has ended, or a thread of it runs or waits for a processor."""
    present = state(pid)
    return None if present is None or not is_asleep(pid) else (present.cpu_s, present.rss_bytes)


def _is_runnable(pid: int, thread: str) -> bool:
    try:
        line = Path(f"/proc/{pid}/task/{thread}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
    return line[line.rindex(b")") :].startswith(b") R")


def identity_of(pid: int) -> tuple[int, int]:
    """Return (pid, start time), (pid, 0) of a process that is gone. No later process has the same pair. Raises: OSError
    if that is unknown, as with too many open files."""
    try:
        return pid, _read_state(pid).start_time
    except (FileNotFoundError, ProcessLookupError):
        return pid, 0


def pid_namespace() -> str:
    """Return what identifies this process's pid namespace among all hosts, empty if it cannot be read. A pid has a
    meaning only within its namespace."""
    try:
        number = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    return f"{number}-{_BOOT_ID}" if _BOOT_ID else ""


def is_alive(identity: tuple[int, int]) -> bool:
    """Return True until the main thread of a process ends, and if that is unknown. `await_end` also waits for its other
    threads."""
    try:
        present = _read_state(identity[0])
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
    return present.start_time == identity[1] and present.state not in "ZX"


def await_end(identity: tuple[int, int], limit: float) -> bool:
    """Wait until a process has ended, at most `limit` seconds. Return True if it has, False also if that is unknown, as
    with too many open files. Reaps it if it is a child.

    It has ended when all its threads have: until then its files and ports are open. /proc shows the state of its main
    thread, which may end earlier."""
    try:
        with _opened(identity) as process:
            if not process.has_ended(max(0.0, limit)):
                return False
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    with contextlib.suppress(ChildProcessError):  # it is nearly always another process's child
        os.waitpid(identity[0], os.WNOHANG)
    return True


def kill(identity: tuple[int, int]) -> None:
    """Kill a process, unless it has ended or cannot be opened."""
    with contextlib.suppress(OSError), _opened(identity) as process:
        process.send(signal.SIGKILL)


@contextmanager
def _opened(identity: tuple[int, int]) -> Iterator[Process]:
    """Yield the process with this pid and start time. Raises: FileNotFoundError or ProcessLookupError if it has ended;
    other OSErrors if that is unknown."""
    _check_start_time(identity)  # a number that another process or a thread has now is not opened
    process = Process(identity[0])
    try:
        _check_start_time(identity)
        yield process
    finally:
        process.close()


def _check_start_time(identity: tuple[int, int]) -> None:
    pid, start_time = identity
    if _read_state(pid).start_time != start_time:
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended; another process has its number now")


def anonymous_bytes() -> int:
    """Return how much memory of this process is resident and no file's; 0 if the kernel does not say (before 4.5)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_bytes().splitlines():
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) << 10
    return 0


class Runnable(msgspec.Struct, frozen=True):
    """How long the main thread of a process has run or waited for a processor. seconds: until the start of its last
    turn on a processor, plus its running time in that turn; turns: number of turns on a processor."""

    seconds: float
    turns: int

    def since(self, before: Runnable, seconds: float, is_runnable: bool) -> float:
        """Return the seconds in which it ran or waited for a processor since an earlier sample. seconds: between the
        two samples; is_runnable: it ran or waited at both."""
        if is_runnable and self.turns == before.turns:
            return seconds  # the kernel counts a wait only once it is over
        return min(seconds, self.seconds - before.seconds)


def runnable(pid: int) -> Runnable | None:
    """Return how long the main thread of a process wanted a processor, None if it is gone or not counted."""
    try:
        ran_ns, waited_ns, turns = map(int, Path(f"/proc/{pid}/schedstat").read_bytes().split())
    except (OSError, ValueError):
        return None
    return Runnable((ran_ns + waited_ns) / 1e9, turns)


def since_start(pid: int) -> ProcessInfo | None:
    """Return a process with the CPU seconds that it has used since it began, None if that cannot be read."""
    present, wanted = state(pid), runnable(pid)
    if present is None:
        return None
    runnable_s = None if wanted is None else wanted.seconds
    return ProcessInfo(present.state, present.cpu_s, None, present.rss_bytes, present.threads, runnable_s)


def waits_in(pid: int) -> str:
    """Return the kernel function in which the main thread of a process sleeps, empty if it runs or that is unknown."""
    try:
        name = encoding.text(Path(f"/proc/{pid}/task/{pid}/wchan").read_bytes())
    except OSError:
        return ""
    return "" if name == "0" else name


def become_subreaper() -> None:
    """Make this process the parent of orphaned descendants, so that it gets their exit statuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def continue_if_stopped(child: int) -> bool:
    """Continue a child that has been stopped since the last call. Return True if it had been."""
    try:
        is_stopped = os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG) is not None
        if is_stopped:
            os.kill(child, signal.SIGCONT)
    except (ChildProcessError, ProcessLookupError):
        return False
    return is_stopped


def reap_strangers(known: Container[int]) -> list[int]:
    """Reap adopted children that no other code here waits for, so that they do not stay as zombies. Return their pids.
    known: children that other code waits for."""
    reaped: list[int] = []
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return reaped
            if ended.si_pid in known:  # the kernel shows no other one before this one is collected
                return reaped + [pid for pid in _own_children() if pid not in known and _reap(pid)]
            os.waitpid(ended.si_pid, os.WNOHANG)
        except ChildProcessError:
            return reaped
        reaped.append(ended.si_pid)


def _own_children() -> Iterator[int]:
    """Return the children of this process, none if the kernel does not tell (CONFIG_PROC_CHILDREN)."""
    tasks: list[Path] = []
    with contextlib.suppress(OSError):  # no descriptor is left: a later call returns them
        tasks = list(Path("/proc/self/task").iterdir())
    for task in tasks:
        with contextlib.suppress(OSError):  # the thread has ended: its children are another thread's now
            yield from map(int, (task / "children").read_bytes().split())


def _reap(pid: int) -> bool:
    """Reap a child if it has ended. Return True if it had."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # reaped meanwhile
        return False


def to_exit(status: int) -> Exit:
    """Convert a wait status."""
    number = status & 0x7F
    if not number:
        return Exit(code=status >> 8)
    return Exit(signal=signal_name(number))


def signal_name(number: int) -> str:
    """Return the name of a signal, "signal N" if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_daemonic() -> bool:
    """Return True if this is a daemonic process of multiprocessing, such as a worker of a DataLoader or of a Pool."""
    module = sys.modules.get("multiprocessing.process")  # imported in such a process
    return module is not None and bool(module.current_process().daemon)


def is_descendant(pid: int, ancestor: int) -> bool:
    """Return True if an unbroken chain of living parents leads from a process to `ancestor`. It ends at a process that
    this one may not see (/proc with hidepid). Raises: OSError if it is unknown now, as with too many open files."""
    for _ in range(_GENERATIONS):
        if pid == ancestor:
            return True
        try:
            parent = _read_state(pid).parent
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False
        if parent <= 1:
            return False
        pid = parent
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
    """Return the files that may hold the count for the content of /proc/self/cgroup, best file first.

    In a container the path there may be the host's, while the container's own group is mounted as the root. So the
    root is read too."""
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
