"""Which threads does a process have?  Those that the kernel adds for an io_uring, as that of torch's store, come and go
by themselves and do not count."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

KERNELS_OWN = "iou-"


def names_of(pid: int | None = None) -> list[str]:
    """Return the kernel's names of the threads of a process, default this one, sorted."""
    folder = Path(f"/proc/{pid or os.getpid()}/task")
    names = []
    for task in os.listdir(folder):
        with contextlib.suppress(OSError):  # it has ended
            names.append((folder / task / "comm").read_text().strip())
    return sorted(name for name in names if not name.startswith(KERNELS_OWN))


def count(pid: int | None = None) -> int:
    """Return the number of threads of a process, default this one."""
    return len(names_of(pid))
