"""Which native threads does this process have beside its main one?

A fork has only the thread that forks. Locks that another one holds stay held in the child."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from resilience.facts.encoding import text

TASKS = Path("/proc/self/task")
KERNELS_OWN = "iou-"  # begins the names of the kernel's workers for an io_uring, which hold no lock of the process


def process_name() -> str:
    """Return the name of the main thread, which others have too unless they are named."""
    return _name_of(os.getpid())


def others(known: Collection[int] = ()) -> list[str]:
    """Return the names of the other threads, sorted. Those that end meanwhile, and the kernel's own, do not count.

    known: native ids of threads to leave out."""
    names = []
    for task in map(int, os.listdir(TASKS)):
        if task != os.getpid() and task not in known:
            with contextlib.suppress(OSError):  # it has ended
                names.append(_name_of(task))
    return sorted(name for name in names if not name.startswith(KERNELS_OWN))


def _name_of(task: int) -> str:
    """Raises: OSError if the thread has ended."""
    return text((TASKS / str(task) / "comm").read_bytes()).strip()
