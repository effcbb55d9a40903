"""Where are the threads of this process?  Read under the interpreter's lock, so nothing can end meanwhile.

Stacks are those that the program would have without this package's wrappers of torch's methods."""

from __future__ import annotations

import gc
import sys
from types import FrameType

_WRAPPERS = "/resilience/adapters/collective_calls.py"


def is_wrapper(file: str) -> bool:
    """Whether a frame of this file only passes a call on to torch."""
    return file.endswith(_WRAPPERS)


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by the thread's identity.

    No collection may begin meanwhile: before Python 3.12 the interpreter allocates here while it holds the lock
    of its list of threads, and a finalizer that gives up the GIL then deadlocks the process
    (https://github.com/python/cpython/issues/106883)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()
