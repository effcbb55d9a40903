"""Where does a server of ours listen?"""

from __future__ import annotations

import socket


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `port` of every address of this host, in the family of `host`.

    Left to itself a TCPStore listens on IPv6 and looks up the name of every client, as an IPv6 address, in
    the thread that serves all of them: where reverse DNS loses a packet the whole store stands still for
    5 s. IPv4 clients of this host are found in the hosts file. Raises: OSError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except socket.gaierror:  # by which name others come is their matter
        family = socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return listener
