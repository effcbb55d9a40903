"""Which TCP connections does this process have?  Read from its own descriptors."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator


def tcp_sockets() -> Iterator[tuple[int, int | None]]:
    """Yield (local port, remote port) of every TCP socket of this process; remote is None while
    listening or unconnected. A descriptor that vanishes meanwhile is left out."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                    continue
                local = copy.getsockname()[1]
                try:
                    yield local, copy.getpeername()[1]
                except OSError:
                    yield local, None
        except OSError:
            continue


def has_foreign_clients(ports: Iterable[int]) -> bool:
    """Return whether another process is connected to a server of this process on one of `ports`.

    A port may also be that of somebody else's server, to which this process is only a client."""
    ports = set(ports)
    pairs = [pair for pair in tcp_sockets() if pair[1] is not None]
    accepted = sum(1 for local, _ in pairs if local in ports)
    own = sum(1 for _, remote in pairs if remote in ports)
    return accepted > own
