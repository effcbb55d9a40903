"""How does a client reach its server without delay, and without taking its port?

torch's TCPStore client loses time in two ways. First, it pauses for a second and more between attempts, and all ranks
that start a moment before their server would wait that long. `await_server` probes first, with short pauses. Second, it
looks up the name of its server's address for a log line that is hardly ever written (formatSockAddr in
torch/csrc/distributed/c10d/socket.cpp, seen in torch 2.13). An IPv4 address is looked up in its IPv6 form, which the
hosts file does not know, so the query goes to the name server. If it is lost, the client stands still for glibc's 5 s
(8 of 400 clients on one host). `short_lookups` makes the connecting thread, and no other, ask once and wait for 1 s,
the least that glibc allows.

A client that keeps trying before its server listens can connect to itself. The kernel takes the client's port from a
range that may contain the server's port; if it takes exactly that one, the attempt succeeds (seen after 21,000
attempts). The server then cannot bind its port until a minute after the end of that connection."""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FIRST_PAUSE, LAST_PAUSE = 0.005, 0.2  # seconds between two attempts
REFUSAL_LIMIT = 1.0  # seconds for a host to answer that no process listens
ATTEMPT_LIMIT = 5.0  # seconds for one attempt: a host that drops packets never answers


def await_server(host: str, port: int, limit: float, is_interrupted: Callable[[], bool] = lambda: False) -> str:
    """Wait until a server listens at host:port, at most `limit` seconds. Return its numeric address.

    is_interrupted: True ends the wait. Raises: OSError, the last attempt's."""
    deadline = time.monotonic() + limit
    pause = FIRST_PAUSE
    while True:
        remaining = deadline - time.monotonic()
        try:
            return _connect(host, port, max(0.001, min(ATTEMPT_LIMIT, remaining)))
        except OSError as error:
            if is_no_name(error) or is_interrupted() or time.monotonic() + pause >= deadline:
                raise
        time.sleep(pause)
        pause = min(pause * 1.5, LAST_PAUSE)


def answers(server: tuple[str, int] | None) -> bool:
    """Return True if a process listens there; True for None, a store without a server."""
    return server is None or _error_of(server) is None


def is_refused(server: tuple[str, int] | None) -> bool:
    """Return True if the host answers that no process listens there. False if it does not answer, and for None."""
    return server is not None and isinstance(_error_of(server), ConnectionRefusedError)


def is_no_name(error: Exception) -> bool:
    """Return True if this error of `addresses_of` says that no host can have such a name: waiting does not help."""
    return isinstance(error.__cause__, UnicodeError)


def addresses_of(host: str, port: int | None, kind: socket.SocketKind, flags: int = 0) -> list[Any]:
    """Return a host's addresses, as `socket.getaddrinfo`. Raises: OSError, also for what cannot be a host's name."""
    try:
        return list(socket.getaddrinfo(host, port, type=kind, flags=flags))
    except UnicodeError as error:  # of a label that is empty or too long
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is no host name: {error}") from error


def _error_of(server: tuple[str, int]) -> OSError | None:
    """Return why a connection fails, None if it does not."""
    try:
        _connect(*server, REFUSAL_LIMIT)
    except OSError as error:
        return error
    return None


def _connect(host: str, port: int, limit: float) -> str:
    """Connect to the first address of `host` that accepts. Return that address. Raises: OSError."""
    last_error = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in addresses_of(host, port, socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as connection:
                connection.settimeout(limit)
                # So that the server can still bind the port.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                connection.connect(address)
                if connection.getsockname() == connection.getpeername():
                    raise ConnectionRefusedError(f"nothing listens at {host}:{port}: the connection went to itself")
                return str(connection.getpeername()[0])
        except OSError as error:
            last_error = error
    try:
        raise last_error
    finally:
        del last_error  # a cycle of error, traceback and frame would keep the calling constructor's store alive


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
    """Limit name lookups of this thread to one query and 1 s while the body runs.

    So resolve names that must be found beforehand. Does nothing unless the C library is glibc."""
    state = _resolver_state()
    if state is None:
        yield
        return
    before = state.retrans, state.retry
    state.retrans, state.retry = 1, 1
    try:
        yield
    finally:
        state.retrans, state.retry = before


def _resolver_state() -> _ResState | None:
    try:
        libc = ctypes.CDLL(None)
        libc.__res_state.restype = ctypes.POINTER(_ResState)
        state: _ResState = libc.__res_state().contents
        if not state.options & RES_INIT and libc.__res_init() != 0:
            return None
    except (AttributeError, OSError, ValueError):
        return None
    return state
