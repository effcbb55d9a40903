"""How are the ranks of a measurement started, timed and, whatever happens, ended?

The benchmark's own process is the one that every rank is forked from: it has imported torch and both
libraries, and has one thread. A rank stamps what it does on a board of shared memory (monotonic
nanoseconds; all ranks share this host's clock), so a stamp costs one store and survives SIGKILL.

The benchmark is child subreaper: whatever a library leaves behind (daemons that forked twice included)
comes back to it, and `sweep` ends all of it by process id."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Mark(IntEnum):
    """What a rank stamps, once an iteration."""

    ENTERED = 0  # the wrapped function's first line
    REDUCED = 1  # its first all_reduce is done
    FAULT = 2  # right before the fault
    ABORT = 3  # the abort hook was called
    READY = 4  # what the fault needs has been set up


class Board:
    """Time stamps of all ranks: one signed 64-bit slot for each (rank, iteration, mark); 0 is none."""

    def __init__(self, ranks: int, iterations: int = 256) -> None:
        self.ranks, self.iterations = ranks, iterations
        self._memory = mmap.mmap(-1, ranks * iterations * len(Mark) * 8)
        self._slots = memoryview(self._memory).cast("q")

    def stamp(self, rank: int, iteration: int, mark: Mark, value: int | None = None) -> None:
        """Write the time (or `value`) into a slot that is still empty."""
        at = (rank * self.iterations + iteration) * len(Mark) + mark
        if not self._slots[at]:
            self._slots[at] = time.monotonic_ns() if value is None else value

    def read(self, rank: int, iteration: int, mark: Mark) -> int | None:
        """Return the stamp in nanoseconds, None where there is none."""
        return self._slots[(rank * self.iterations + iteration) * len(Mark) + mark] or None

    def stamped(self, iteration: int, mark: Mark) -> dict[int, int]:
        """Return the stamps of all ranks that have one, in nanoseconds by rank."""
        found = {rank: self.read(rank, iteration, mark) for rank in range(self.ranks)}
        return {rank: stamp for rank, stamp in found.items() if stamp is not None}


class Job:
    """Ranks forked from this process, all running `body(rank)`.

    environment: set in every rank on top of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    folder: becomes the ranks' working folder; rank i writes its output to `<i>.log` there."""

    def __init__(
        self,
        world_size: int,
        body: Callable[[int], None],
        folder: Path,
        environment: dict[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.pids: dict[int, int] = {}
        self.statuses: dict[int, int] = {}  # rank -> exit code, or minus the signal that ended it
        base = {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "USER_PORT": str(free_port()),
            **(environment or {}),
        }
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, body, folder, base)
            self.pids[rank] = pid

    def wait(self, limit: float, ranks: Iterable[int] | None = None) -> bool:
        """Wait at most `limit` seconds until all ranks (or these) have ended; answers whether they have.

        A rank that ends is reaped at once, as its launcher would."""
        deadline = time.monotonic() + limit
        poll = select.poll()
        open_fds: dict[int, int] = {}
        awaited = set(self.pids if ranks is None else ranks)
        try:
            for rank, pid in self.pids.items():
                if rank not in self.statuses:
                    fd = os.pidfd_open(pid)
                    open_fds[fd] = rank
                    poll.register(fd, select.POLLIN)
            while awaited - self.statuses.keys():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                for fd, _ in poll.poll(left * 1000):
                    rank = open_fds.pop(fd)
                    poll.unregister(fd)
                    os.close(fd)
                    _, status = os.waitpid(self.pids[rank], 0)
                    self.statuses[rank] = os.waitstatus_to_exitcode(status)
            return True
        finally:
            for fd in open_fds:
                os.close(fd)

    def end(self, linger: float = 3.0) -> int:
        """Give what the ranks left running `linger` seconds, then kill it; answers how many were killed."""
        self.wait(0)
        return sweep(linger if len(self.statuses) == len(self.pids) else 0.0)

    def output(self, rank: int) -> str:
        """Return what a rank has printed."""
        return (self.folder / f"{rank}.log").read_text(errors="replace")


def prepare() -> None:
    """Make this process the one to fork from. Raises: RuntimeError if it has more than one thread."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        raise RuntimeError(
            f"the process to fork from has {len(threads)} threads and must have one; start it as "
            "`python -m tests.benchmarks.run`, which sets OPENBLAS_NUM_THREADS=1 before it imports torch"
        )


def sweep(linger: float = 0.0) -> int:
    """Wait `linger` seconds for everything below this process to end, kill the rest; answers how many."""
    deadline = time.monotonic() + linger
    while _reap() and time.monotonic() < deadline:
        time.sleep(0.02)
    killed: set[int] = set()
    limit = time.monotonic() + 30
    while _reap() and time.monotonic() < limit:
        for pid in descendants(os.getpid()):
            _kill(pid)
            killed.add(pid)
        time.sleep(0.02)
    return len(killed)


def descendants(pid: int) -> Iterator[int]:
    """Yield the process ids below `pid`, parents first."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def children(pid: int) -> list[int]:
    """Return the process ids right below `pid`, of all its threads; none if it has gone."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_running(pid: int) -> bool:
    """Answer whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all living threads of a process, in seconds, to the nanosecond."""
    return (
        sum(
            int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
            for thread in os.listdir(f"/proc/{pid}/task")
        )
        / 1e9
    )


def private_bytes(pid: int) -> int:
    """Return the memory that only this process has, in bytes."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:")):
            total += int(line.split()[1]) * 1024
    return total


def _be_rank(rank: int, body: Callable[[int], None], folder: Path, environment: dict[str, str]) -> None:
    code = 1
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.chdir(folder)
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
        body(rank)
        code = 0
    except BaseException:  # the rank's outermost frame
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reap() -> bool:
    """Reap every child that has ended; answers whether any child is left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")
