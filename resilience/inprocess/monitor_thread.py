"""How does one thread make another one raise?  Names of the compatible API.

The wrapper itself interrupts by signal (`system.interrupt`). An exception that is set on a thread is raised only
when that thread next runs bytecode: not inside `sleep`, a lock or a queue. These functions remain for threads
other than main, and for code written against that API."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from typing import Any

from resilience.errors import RankShouldRestart

__all__ = ["RankShouldRestart", "async_raise", "reraise_if_unraisable"]

# Our own handle: argument types set on the shared one would also apply to its other users.
_set_async_exc = ctypes.PyDLL(None).PyThreadState_SetAsyncExc
_set_async_exc.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_async_exc.restype = ctypes.c_int


def async_raise(tid: int, exc_type: type[BaseException], event: threading.Event | None = None) -> None:
    """Raise `exc_type` in thread `tid` (threading's ident) when it next runs bytecode.

    event: if given, wait until it is set, however long that takes.
    Raises: RuntimeError if there is no such thread."""
    if event is not None:
        event.wait()
    if sys.is_finalizing():
        return
    if _set_async_exc(tid, exc_type) == 0:
        raise RuntimeError(f"thread {tid} does not exist (any more): {exc_type.__name__} was not raised in it")


@contextlib.contextmanager
def reraise_if_unraisable(exc_type: type[BaseException]) -> Iterator[None]:
    """While the body runs, raise `exc_type` in the main thread again if it is lost where Python cannot
    raise: in a `__del__`, a weakref or a gc callback. The previous hook is still called."""
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        previous(unraisable)
        if issubclass(unraisable.exc_type, exc_type):
            # Raised here, it would be lost inside this hook too. So a thread of its own raises it.
            has_left_hook = threading.Event()
            main = threading.main_thread().ident
            threading.Thread(target=async_raise, args=(main, exc_type, has_left_hook), daemon=True).start()
            has_left_hook.set()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = previous
