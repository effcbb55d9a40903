"""Stop a process, and know that it stands still; end processes of which one may take others with it.

The kernel gives SIGSTOP to one thread of a process. The others run on until that one has had its turn, which takes
long on a busy machine."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

LIMIT = 120.0  # seconds
STANDS_STILL = "TtZX"  # states of a thread


def stop(*pids: int) -> None:
    """Stop these processes all at once; return when no thread of them runs."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    await_stops(pids)


def await_stops(pids: Iterable[int]) -> None:
    """Wait until no thread of these processes runs."""
    deadline = time.monotonic() + LIMIT
    for pid in pids:
        while running := [state for state in _states(pid) if state not in STANDS_STILL]:
            assert time.monotonic() < deadline, (
                f"process {pid} has threads in states {running} {LIMIT:g} s after SIGSTOP"
            )
            time.sleep(0.001)


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill each of these. One that is tied to another of them has ended with that one, and may be gone by its turn."""
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def _states(pid: int) -> list[str]:
    states = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return []  # it has ended
    for thread in threads:
        try:
            states.append(Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    return states
