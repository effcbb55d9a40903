"""How does a rank leave the constructor of a torch TCPStore?

The constructor keeps connecting until its timeout has passed: 300 s, or the 30 min of a process group. A signal does
not end that: the constructor treats EINTR as one more failed attempt. So a rank would stay in it if the store's host
has died or never came. During an iteration the constructor is replaced by one that searches for the server in Python,
where an interruption arrives, and leaves to torch only attempts of at most `ATTEMPT` seconds.

torch also waits without a limit for the first answer of a server that has accepted the connection, and the host of a
store waits for its clients. `cut` ends the connection that such a wait needs. It does the same for a store constructed
in this iteration, if a group is built over it and a rank is missing there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from resilience.system.client_sockets import await_server
from resilience.system.open_sockets import Connection, Opening

ATTEMPT = 1.0  # seconds for torch to connect to a server that exists
DEFAULT_TIMEOUT = timedelta(seconds=300)  # torch's


_current: Opening | None = None  # by the construction that the main thread is in
_constructed: list[Connection] = []  # of the stores that the main thread has constructed in this iteration


@contextmanager
def interruptible() -> Iterator[None]:
    """While the body runs, an iteration, let an interruption of the main thread end the constructor of any TCPStore."""
    original: Any = vars(dist.TCPStore)["__init__"]

    def construct(
        store: dist.TCPStore,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
        *positional: Any,
        **named: Any,
    ) -> None:
        def attempt(limit: timedelta) -> None:
            original(store, host_name, port, world_size, is_master, limit, *positional, **named)

        if threading.current_thread() is not threading.main_thread():
            attempt(timeout)  # other threads are not interrupted
            return
        with _recorded_construction(port):
            if is_master:
                attempt(timeout)
            else:
                _connect(host_name, port, timeout, attempt)
                store.set_timeout(timeout)

    setattr(dist.TCPStore, "__init__", construct)  # noqa: B010  no plain assignment to a method
    try:
        yield
    finally:
        setattr(dist.TCPStore, "__init__", original)  # noqa: B010
        _constructed.clear()


def _connect(host: str, port: int, timeout: timedelta, attempt: Callable[[timedelta], None]) -> None:
    """Repeat short attempts until one succeeds. Raises: DistNetworkError after `timeout`."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        with suppress(OSError):  # torch's error follows
            await_server(host, port, deadline - time.monotonic())
        try:
            return attempt(min(timeout, timedelta(seconds=ATTEMPT)))
        except dist.DistNetworkError as error:
            if time.monotonic() >= deadline:
                raise dist.DistNetworkError(
                    f"no store answered at {host}:{port} within {timeout.total_seconds():g} s (timeout): {error}"
                ) from error


@contextmanager
def _recorded_construction(port: int) -> Iterator[None]:
    global _current
    _current = opening = Opening(port)
    try:
        yield
        _constructed.extend(opening.connections())
    finally:
        _current = None


def cut(port: int | None) -> int:
    """End the connections of the store that the main thread constructs now, and of stores constructed in this iteration
    whose server is on `port`. Return how many. Any other thread."""
    opening = _current
    opened = [] if opening is None else opening.connections()
    opened += [connection for connection in _constructed if connection.port == port]
    for connection in opened:
        connection.shut_down()
    return len(opened)
