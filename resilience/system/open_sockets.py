"""Which TCP connections does this process have, and how is a connection ended whose answer never comes?

Reads the process's own descriptors, because the libraries that open the connections give no access."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

T = TypeVar("T")
_PROBES = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 4}  # seconds, seconds, number


def tcp_sockets() -> Iterator[tuple[int, int | None]]:
    """Yield (local port, remote port) of every TCP socket of this process; remote is None while listening or
    unconnected. A descriptor that vanishes meanwhile is left out."""
    for copy in _copies():
        local = copy.getsockname()[1]
        try:
            yield local, copy.getpeername()[1]
        except OSError:
            yield local, None


def is_listening(pid: int, port: int) -> bool:
    """Return whether a process has a TCP server on `port`. False for a process that is gone or of another user."""
    import psutil  # takes 10 ms, and is needed where an agent's limit is too low

    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except (psutil.Error, RuntimeError):  # the second one if the kernel's list cannot be read
        return False
    return any(connection.status == psutil.CONN_LISTEN and connection.laddr.port == port for connection in connections)


def has_foreign_clients(ports: Iterable[int]) -> bool:
    """Return True if another process is connected to a server of this process on one of `ports`.

    A port may also belong to another process's server, to which this process is only a client."""
    ports = set(ports)
    pairs = [pair for pair in tcp_sockets() if pair[1] is not None]
    accepted = sum(1 for local, _ in pairs if local in ports)
    outgoing = sum(1 for _, remote in pairs if remote in ports)
    return accepted > outgoing


def shut_down(address: str, port: int) -> int:
    """End every connection of this process to the server at a numeric address. Return how many.

    A thread that waits for an answer there gets an error at once, in whatever library it is."""
    server = _plain(address)
    ended = 0
    for copy in _copies():
        try:
            host, remote = copy.getpeername()[:2]
            if remote == port and _plain(host) == server:
                copy.shutdown(socket.SHUT_RDWR)
                ended += 1
        except OSError:  # not connected, or no longer
            continue
    return ended


class Connection(NamedTuple):
    """One TCP connection of this process: its descriptor, its inode, and the port at the other end."""

    fd: int
    inode: int
    port: int

    def keep_alive(self) -> None:
        """Have the kernel probe it while it is idle: a lost one ends after two minutes, and no firewall forgets it."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fd)) as copy:
            if os.fstat(copy.fileno()).st_ino == self.inode:
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _PROBES.items():
                    copy.setsockopt(socket.IPPROTO_TCP, option, value)

    def shut_down(self) -> None:
        """End it, unless it has been closed. A thread that waits for an answer there gets an error at once."""
        try:
            with socket.socket(fileno=os.dup(self.fd)) as copy:
                if os.fstat(copy.fileno()).st_ino == self.inode:  # else the descriptor has been reused
                    copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed, or no longer connected


class Opening:
    """The connections to one port that this process opens from now on: a thread may still wait in the midst of it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._before = frozenset(connected())

    def connections(self) -> list[Connection]:
        return [one for one in connected() if one.port == self._port and one not in self._before]


def opened_by(connect: Callable[[], T]) -> tuple[T, list[Connection]]:
    """Call `connect`. Return its result and the connections of this process that were not there before.

    Other threads may open connections meanwhile: compare ports to tell them apart."""
    before = set(connected())
    result = connect()
    return result, [connection for connection in connected() if connection not in before]


def connected() -> Iterator[Connection]:
    """Yield each TCP connection of this process."""
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = int(name)
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(fd)) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    yield Connection(fd, os.fstat(copy.fileno()).st_ino, copy.getpeername()[1])
        except OSError:
            continue


def _copies() -> Iterator[socket.socket]:
    """Yield a duplicate of each TCP socket of this process, and close it afterwards."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    yield copy
        except OSError:
            continue


def _plain(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address; an IPv4 address in IPv6 form becomes IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
