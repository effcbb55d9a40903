"""Does the main thread run bytecode?  Asks it without interrupting anything.

Python runs a pending call in the main thread between two bytecodes. If the call does not run, the thread is
blocked in C, or another thread holds the GIL. This proves life, not progress: a loop that gets nowhere answers
as well."""

from __future__ import annotations

import ctypes
from typing import Any

from resilience.monitor.page import RankSide

_pending_page: RankSide | None = None


def _answer(_: Any) -> int:
    global _pending_page
    page, _pending_page = _pending_page, None
    if page is not None:
        page.tick()
    return 0


# Never freed: the interpreter may still hold it after the last call.
_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_answer)


def forget_request() -> None:
    """Drop the pending request, if there is one: its answer then has no effect."""
    global _pending_page
    _pending_page = None


def request_tick(page: RankSide) -> None:
    """Ask the main thread to write a proof of life into `page`. At most one request is pending."""
    global _pending_page
    if _pending_page is None:
        _pending_page = page
        if ctypes.pythonapi.Py_AddPendingCall(_CALL, None) != 0:
            _pending_page = None  # the interpreter's queue is full: ask again at the next tick
