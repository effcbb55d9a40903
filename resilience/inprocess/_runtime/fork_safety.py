"""May a rank's monitor be forked from this process, and should it be?"""

from __future__ import annotations

import sys
import threading

from resilience.system import background, native_threads, processes, stacks

MOST_MEMORY = 1 << 30
"""Bytes of this process that a forked monitor may keep. An executed one holds about 0.2 GiB itself, for torch."""


def why_not_fork() -> str:
    """Return the reason why a forked monitor could inherit a held lock, empty if it cannot."""
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    # These two are ours, and wait in the kernel.
    unsafe_threads = [name for name in names if name not in (stacks.THREAD, background.THREAD)]
    if unsafe_threads:
        return f"the process has other threads: {', '.join(unsafe_threads[:3])}"
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return "CUDA is initialised"
    # OpenBLAS's pool survives a fork and carries the process's own name; others name their threads. From 3.14 on Python
    # names its own, which are known by now.
    known = [thread.native_id for thread in threading.enumerate() if thread.native_id is not None]
    native = sorted(set(native_threads.others(known)) - {native_threads.process_name()})
    return f"the process has native threads: {', '.join(native[:3])}" if native else ""


def why_rather_not_fork() -> str:
    """Return why a forked monitor would cost too much, empty if it would not.

    It shares this process's memory until either writes to it, and keeps whatever this process frees or overwrites."""
    held = processes.anonymous_bytes()
    if held <= MOST_MEMORY:
        return ""
    return f"the process holds {held / 2**30:.1f} GiB of memory, which a forked monitor keeps until the call ends"
