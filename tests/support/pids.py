"""Does a process still run?"""

from __future__ import annotations

import psutil


def has_ended(pid: int) -> bool:
    """Return True if there is no such process, or if it only waits for its parent to read its exit status."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
