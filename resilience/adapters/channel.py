"""A line between a rank and its monitor: whole messages, never blocking.

SOCK_SEQPACKET keeps message boundaries and tells when the other end is gone. Sending never waits: a full
line answers False, and the sender counts what it dropped."""

from __future__ import annotations

import select
import socket

LIMIT = 64 * 1024  # bytes; one message
ChannelClosed = ConnectionResetError  # Python's own error for an other end that is gone


class Channel:
    """One end of a line. Any thread may send; one receives."""

    limit = LIMIT

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes) -> bool:
        """Send one message without waiting; answers whether it is on its way.

        It is not if the line is full, the other end is gone, or the message is longer than `limit`."""
        if len(message) > LIMIT:
            return False
        try:
            return self._socket.send(message, socket.MSG_NOSIGNAL) == len(message)
        except OSError:
            return False

    def receive(self, wait: float) -> bytes | None:
        """Return the next message, None if there is none within `wait` seconds.

        Raises: ChannelClosed, once all that was sent before has been received."""
        try:
            if wait > 0:
                poll = select.poll()  # select() cannot take a descriptor above 1023
                poll.register(self._socket, select.POLLIN)
                if not poll.poll(wait * 1000):
                    return None
            message = self._socket.recv(LIMIT)
        except BlockingIOError:
            return None
        except (OSError, ValueError) as error:  # ValueError: our own end was closed
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
