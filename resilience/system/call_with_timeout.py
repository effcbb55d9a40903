"""Does a call that may never return, return in time?

The call runs in a thread of its own. If it is late, the thread is left behind: Python cannot end it. The caller
decides what to do then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from resilience.system import devices

START_LIMIT = 5.0  # seconds in which a thread may be refused
PAUSE = 0.05  # seconds between two attempts to start one


def start(make: Callable[[], threading.Thread]) -> threading.Thread:
    """Make a thread and start it. If this host or process has no thread left, try again for START_LIMIT seconds with
    another one: a restart of other processes may use up a limit for a moment. Raises: RuntimeError."""
    deadline = time.monotonic() + START_LIMIT
    while True:
        thread = make()
        try:
            thread.start()
            return thread
        except RuntimeError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(PAUSE)


def returns_within(limit: float, function: Callable[[], object], name: str) -> bool:
    """Run `function` in a daemon thread. Return True if it returned within `limit` seconds.

    name: of the thread, which uses the caller's CUDA device. Raises: what the function raised in that time;
    RuntimeError if this host cannot start a thread."""
    raised: list[BaseException] = []
    device = devices.current()

    def work() -> None:
        try:
            devices.use(device)
            function()
        except BaseException as error:  # re-raised in the calling thread
            raised.append(error)

    thread = start(lambda: threading.Thread(target=work, name=name, daemon=True))
    thread.join(limit)
    if thread.is_alive():
        return False
    if raised:
        raise raised[0]
    return True
