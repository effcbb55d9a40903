"""Does the main thread run bytecode?  Asks it without interrupting anything.

Python runs a pending call in the main thread between two bytecodes. If the call does not run, the thread is
blocked in C, or another thread holds the GIL. This proves life, not progress: a loop that gets nowhere answers
as well.

The pending call is `sem_post` of the C library, so it runs no Python. In a Python function, a signal handler of the
program could raise at its start: ctypes would swallow the exception, return an arbitrary result to the interpreter, and
the program would get a SystemError in its place."""

from __future__ import annotations

import ctypes
import os

from resilience.monitor.page import RankSide

# Keeps the GIL during a call; none of these functions waits. A handle of our own: see `system.interrupt`.
_libc = ctypes.PyDLL(None)
_add_pending_call = _libc.Py_AddPendingCall
_add_pending_call.argtypes = ctypes.c_void_p, ctypes.c_void_p
_sem_post = ctypes.cast(_libc.sem_post, ctypes.c_void_p)

# A sem_t, which counts the answers. Never freed: the interpreter may still hold a request after the last call.
_answers = (ctypes.c_uint64 * 8)()
_libc.sem_init(_answers, 0, 0)

_is_pending = False


def forget_request() -> None:
    """Drop the pending request, if there is one."""
    global _is_pending
    _take_answers()
    _is_pending = False


os.register_at_fork(after_in_child=forget_request)


def request_tick(page: RankSide) -> None:
    """Write a proof of life into `page` if the main thread has answered the last request, and ask it again. At most one
    request is pending."""
    global _is_pending
    if _take_answers():
        _is_pending = False
        page.tick()
    if not _is_pending:  # if the interpreter's queue is full, the next call asks again
        _is_pending = _add_pending_call(_sem_post, ctypes.addressof(_answers)) == 0


def _take_answers() -> bool:
    """Return True if there was an answer."""
    is_answered = False
    while _libc.sem_trywait(_answers) == 0:
        is_answered = True
    return is_answered
