"""A line between a rank and its monitor: whole messages, never blocking.

SOCK_SEQPACKET keeps message boundaries and tells when the other end is gone. Sending never waits: a full
line answers False, and the sender counts what it dropped."""

from __future__ import annotations

import select
import socket

LIMIT = 64 * 1024  # bytes; one message


class ChannelClosed(Exception):
    """The other end is gone."""


class Channel:
    """One end of a line."""

    limit = LIMIT

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes) -> bool:
        """Send one message without waiting; answers whether it is on its way."""
        if len(message) > LIMIT:
            return False
        try:
            return self._socket.send(message, socket.MSG_NOSIGNAL) == len(message)
        except OSError:
            return False

    def receive(self, wait: float) -> bytes | None:
        """Return the next message, None if there is none within `wait` seconds.

        Raises: ChannelClosed."""
        if wait > 0 and not select.select([self._socket], [], [], wait)[0]:
            return None
        try:
            message = self._socket.recv(LIMIT)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosed from error
        if not message:
            raise ChannelClosed
        return message

    def close(self) -> None:
        self._socket.close()


def pair() -> tuple[Channel, Channel]:
    """Return both ends of a new line."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * LIMIT)
    return Channel(ours), Channel(theirs)
