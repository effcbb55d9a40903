"""How much memory does this process hold that a leak would add to?"""

from __future__ import annotations

import ctypes
from pathlib import Path

M_MMAP_THRESHOLD = -3  # of <malloc.h>
LARGE = 1 << 16  # bytes


def give_large_blocks_back() -> None:
    """Make glibc return each block of LARGE bytes or more as soon as it is freed.

    Else it raises that size to the largest block that was ever freed, up to 32 MiB. The end of a thread's heap, which
    `malloc_trim` does not reach, then keeps up to twice that size."""
    if ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE) != 1:
        raise OSError("mallopt refuses M_MMAP_THRESHOLD")


def anonymous_kib() -> int:
    """Return the resident memory of this process that is no file's (pages of libraries come in one by one, for long)
    and that glibc does not keep free: it keeps up to 16 heaps, each as large as it ever was, and each new thread may
    take another one."""
    ctypes.CDLL(None).malloc_trim(0)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1])
