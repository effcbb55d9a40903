"""Does the main thread run bytecode?  Asks it, without interrupting anything.

Python runs a pending call in the main thread between two bytecodes. If the call does not come through,
the thread is blocked in C or something else holds the GIL. It proves life, not progress: a loop that
goes nowhere answers as well."""

from __future__ import annotations

import ctypes
from typing import Any

from resilience.monitor.page import RankSide

_asked: RankSide | None = None


def _answer(_: Any) -> int:
    global _asked
    page, _asked = _asked, None
    if page is not None:
        page.tick()
    return 0


# Kept for the life of the process: the interpreter may still hold it when the last call is over.
_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_answer)


def forget_request() -> None:
    """Let the request under way, if there is one, be answered into nothing."""
    global _asked
    _asked = None


def request_tick(page: RankSide) -> None:
    """Ask the main thread to store a proof of life into `page`. One request is under way at a time."""
    global _asked
    if _asked is None:
        _asked = page
        if ctypes.pythonapi.Py_AddPendingCall(_CALL, None) != 0:
            _asked = None  # the interpreter's queue is full: ask again at the next tick
