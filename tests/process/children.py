"""A child process that a test directs over a line, and that ends with the test at the latest.

A body runs in a fork of the test's process and gets its end of the line. The test hears what it sends,
tells it to go on, signals it, and waits for its end."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

LIMIT = 120.0  # seconds that a child may take for anything, beside other work too


class Child:
    """The test's view of its child."""

    def __init__(self, pid: int, line: Connection) -> None:
        self.pid = pid
        self.line = line
        self.status: int | None = None

    def hear(self) -> Any:
        """Return what the child sends next."""
        assert self.line.poll(LIMIT), "the child said nothing"
        return self.line.recv()

    def tell(self, what: Any = None) -> None:
        """Send something to the child."""
        self.line.send(what)

    def send_signal(self, number: int) -> None:
        """Signal the child."""
        assert self.status is None
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Reap the child; answers its wait status."""
        if self.status is None:
            _, self.status = os.waitpid(self.pid, 0)
        return self.status


@contextmanager
def child(body: Callable[[Connection], object]) -> Iterator[Child]:
    """Run `body(line)` in a child. Killed and reaped at the end, if it is still there."""
    here, there = multiprocessing.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the test session's time limit is a thread
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            here.close()
            faulthandler.disable()  # a crash that a test wants is no news on its stderr
            body(there)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    there.close()
    started = Child(pid, here)
    try:
        yield started
    finally:
        if started.status is None:
            started.send_signal(signal.SIGKILL)
            started.wait()
        here.close()


def hear(line: Connection) -> Any:
    """In the child: wait until the test tells something."""
    if not line.poll(LIMIT):
        raise TimeoutError("the test said nothing")
    return line.recv()


def hold(line: Connection, what: Any = "ready") -> None:
    """In the child: say that this point is reached, and wait until the test lets go."""
    line.send(what)
    hear(line)
