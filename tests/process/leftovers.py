"""Which processes belong to a command that a test ran?  Those that inherited its run folder."""

from __future__ import annotations

from pathlib import Path

import psutil


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Return the processes that were started with this RESILIENCE_RUN_DIR in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RESILIENCE_RUN_DIR") == str(run_dir):
                found.append(process)
        except psutil.Error:
            pass  # of another user, or gone meanwhile
    return found


def left_after(run_dir: Path, limit: float = 60.0) -> list[psutil.Process]:
    """Return those that are still there `limit` seconds later, and end them."""
    left: list[psutil.Process] = psutil.wait_procs(processes_of(run_dir), timeout=limit)[1]
    for process in left:
        process.kill()
    return left
