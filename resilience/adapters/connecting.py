"""How does a client reach its server without delay, and without taking its place?

torch's TCPStore client loses time in two ways. It pauses for a second and more between attempts, which
ranks that start a moment before their server would all wait: `await_server` looks first, with short
pauses. And it looks up the name of the address it connects to, for the text of a log line that is hardly
ever written (formatSockAddr in torch/csrc/distributed/c10d/socket.cpp, seen in torch 2.13); an IPv4 address
is looked up in its IPv6 form, which the hosts file does not know, so the question goes to the name server,
and if it is lost the client stands still for glibc's 5 s (8 of 400 clients on one host). `short_lookups`
has the connecting thread, and it alone, ask once and wait for 1 s, the least that glibc knows.

A client that tries again and again before its server listens can connect to itself: the kernel takes the port of a
client from the range in which the server's port may lie too, and if it takes just that one, the attempt succeeds (seen
after 21,000 attempts). The server could then not bind its port, for a minute after the end of that connection."""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_PAUSE, LAST_PAUSE = 0.005, 0.2  # seconds between two attempts
ATTEMPT_LIMIT = 5.0  # seconds for one attempt: a host that drops packets never answers


def await_server(host: str, port: int, limit: float, is_interrupted: Callable[[], bool] = lambda: False) -> str:
    """Wait until something listens at host:port, at most `limit` seconds; returns its numeric address.

    is_interrupted: True ends the wait. Raises: OSError, that of the last attempt."""
    deadline = time.monotonic() + limit
    pause = FIRST_PAUSE
    while True:
        left = deadline - time.monotonic()
        try:
            return _connect(host, port, max(0.001, min(ATTEMPT_LIMIT, left)))
        except OSError:
            if is_interrupted() or time.monotonic() + pause >= deadline:
                raise
        time.sleep(pause)
        pause = min(pause * 1.5, LAST_PAUSE)


def _connect(host: str, port: int, limit: float) -> str:
    """Connect to the first address of `host` that takes the connection; return that address. Raises: OSError."""
    failed = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as line:
                line.settimeout(limit)
                line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the server can bind the port all the same
                line.connect(address)
                if line.getsockname() == line.getpeername():
                    raise ConnectionRefusedError(f"nothing listens at {host}:{port}: the connection led to itself")
                return str(line.getpeername()[0])
        except OSError as error:
            failed = error
    try:
        raise failed
    finally:
        del failed  # a cycle of error, traceback and frame would keep the store whose constructor calls this


RES_INIT = 1


class _ResState(ctypes.Structure):
    """The beginning of glibc's `struct __res_state` (resolv.h), part of its stable interface."""

    _fields_ = (
        ("retrans", ctypes.c_int),  # seconds
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
    )


@contextmanager
def short_lookups() -> Iterator[None]:
    """Let name lookups of this thread give up after one question and 1 s while the body runs.

    So resolve beforehand what must be found. Does nothing where the C library is not glibc."""
    state = _state_of_this_thread()
    if state is None:
        yield
        return
    before = state.retrans, state.retry
    state.retrans, state.retry = 1, 1
    try:
        yield
    finally:
        state.retrans, state.retry = before


def _state_of_this_thread() -> _ResState | None:
    try:
        libc = ctypes.CDLL(None)
        libc.__res_state.restype = ctypes.POINTER(_ResState)
        state: _ResState = libc.__res_state().contents
        if not state.options & RES_INIT and libc.__res_init() != 0:
            return None
    except (AttributeError, OSError, ValueError):
        return None
    return state
