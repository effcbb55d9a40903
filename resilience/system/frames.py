"""Where are the threads of this process, and whose code do they run?

Frames are read under the interpreter's lock, so no thread can end meanwhile. Stacks leave out this package's wrappers
of torch's methods."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import traceback
from types import FrameType, TracebackType

from resilience.facts.fork_lock import fork_lock
from resilience.facts.interruptions import Frame

MAX_FRAMES = 60
# Held while garbage collection is off: two threads that take stacks at once,
# or a child forked meanwhile, would leave it off for ever.
_TAKING = fork_lock()
_WRAPPERS = ("/resilience/system/collective_calls.py", "/resilience/system/group_shutdowns.py")
_STANDARD = os.path.join(os.path.dirname(threading.__file__), "")
_OURS = tuple(
    os.path.join(os.path.dirname(os.path.dirname(__file__)), layer, "")
    for layer in ("calibration", "core", "facts", "inprocess", "monitor", "system", "telemetry")
)


def is_wrapper(file: str) -> bool:
    """Return True if a frame of this file only passes a call on to torch."""
    return file.endswith(_WRAPPERS)


def is_ours(file: str) -> bool:
    """Return True if a file belongs to the part of this package that runs inside a rank."""
    return file.startswith(_OURS)


@functools.cache
def is_standard(file: str) -> bool:
    """Return True if a file belongs to the standard library."""
    return file.startswith("<frozen ") or (file.startswith(_STANDARD) and "-packages" + os.sep not in file)


@functools.cache
def is_torch(file: str) -> bool:
    """Return True if a file belongs to torch."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return torch is not None and file.startswith(os.path.join(os.path.dirname(torch), ""))


def places_of(tb: TracebackType | None) -> list[tuple[FrameType, int | None]]:
    """Return the frames of a traceback and their lines, innermost last."""
    return [place for place in traceback.walk_tb(tb) if not is_wrapper(place[0].f_code.co_filename)]


def stack_of_traceback(tb: TracebackType | None) -> tuple[Frame, ...]:
    """Return the innermost frames of a traceback as plain data, innermost last."""
    frames = [Frame(frame.f_code.co_filename, line or 0, frame.f_code.co_name) for frame, line in places_of(tb)]
    return tuple(frames[-MAX_FRAMES:])


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by the thread's identity.

    No garbage collection may begin meanwhile. Before Python 3.12 the interpreter allocates here while it holds the lock
    of its list of threads; a finalizer that releases the GIL then deadlocks the process
    (https://github.com/python/cpython/issues/106883)."""
    with _TAKING:
        was_enabled = gc.isenabled()
        try:
            gc.disable()
            return sys._current_frames()
        finally:
            if was_enabled:
                gc.enable()
