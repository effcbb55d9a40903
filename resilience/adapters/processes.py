"""Other processes: are they alive, what do they do, how did they end.

A process is held by its pidfd, so that a recycled pid is never signalled. A monitor is no parent of its
rank and cannot wait for it: how the rank ended is read from /proc while it dies, which the same user
may do."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

import msgspec

from resilience.core.attribution import Exit

EXIT_POLL = 0.001  # seconds between looks at a dying process
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessState(msgspec.Struct, frozen=True):
    """What /proc tells of a process. state: R S D T Z …; cpu_s: user and system time used; start_time:
    clock ticks after boot, which together with the pid names a process for good."""

    state: str
    cpu_s: float
    rss_bytes: int
    threads: int
    start_time: int
    exit_code: int  # as wait() would report it; 0 while running


def state(pid: int) -> ProcessState | None:
    """Return the state of a process, None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold blanks and brackets
    return ProcessState(
        state=fields[0],
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
        rss_bytes=int(fields[21]) * _PAGE,
        threads=int(fields[17]),
        start_time=int(fields[19]),
        exit_code=int(fields[49]),
    )


class Process:
    """A process of somebody else, held by its pidfd."""

    def __init__(self, pid: int) -> None:
        """Raises: ProcessLookupError if there is no such process."""
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)

    def send(self, number: int) -> bool:
        """Send a signal; answers whether the process was still there."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def has_ended(self, wait: float = 0.0) -> bool:
        """Wait at most `wait` seconds for the process to end; answers whether it has."""
        return bool(select.select([self.pidfd], [], [], wait)[0])

    def exit_status(self, limit: float) -> Exit:
        """Return how the process ended, as far as it can be seen within `limit` seconds.

        A process that was reaped before anyone looked leaves nothing: both fields are None then."""
        deadline = time.monotonic() + limit
        while True:
            seen = state(self.pid)
            if seen is None:
                return Exit()
            if seen.exit_code or seen.state == "Z":
                return to_exit(seen.exit_code)
            if time.monotonic() >= deadline:
                return Exit()
            time.sleep(EXIT_POLL)


def to_exit(status: int) -> Exit:
    """Take a wait status apart."""
    number = status & 0x7F
    if not number:
        return Exit(code=status >> 8)
    try:
        return Exit(signal=signal.Signals(number).name)
    except ValueError:
        return Exit(signal=f"signal {number}")


def oom_kills() -> int | None:
    """Return how many processes of this cgroup the kernel has killed for memory, None if unknown."""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            root = "/sys/fs/cgroup" if number == "0" else f"/sys/fs/cgroup/{controllers}"
            name = "memory.events" if number == "0" else "memory.oom_control"
            if number != "0" and "memory" not in controllers.split(","):
                continue
            for entry in Path(f"{root}{path}/{name}").read_text().splitlines():
                if entry.startswith("oom_kill "):
                    return int(entry.split()[1])
    except (OSError, ValueError):
        return None
    return None
