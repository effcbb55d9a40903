"""A channel between two processes of one node: whole messages, never blocking.

SOCK_SEQPACKET keeps message boundaries and shows when the other end is gone. Sending never waits: if the channel is
full, `send` returns False, and the sender counts what it dropped. A message may carry open files."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

LIMIT = 64 * 1024  # bytes; one message
MOST_FDS = 253  # that a message carries; the kernel's own limit (SCM_MAX_FD)
BACKLOG = 64
T = TypeVar("T")
ChannelClosed = ConnectionResetError  # Python's own error when the other end is gone


class PeerProcess(NamedTuple):
    """The process at the other end, from the kernel, at the time of the connection or of the pair's creation."""

    pid: int
    uid: int


class Channel:
    """One end of a channel. Any thread may send; one receives."""

    limit = LIMIT

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def peer(self) -> PeerProcess:
        """Return the process at the other end."""
        size = struct.calcsize("3i")
        pid, uid, _ = struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return PeerProcess(pid, uid)

    def send(self, message: bytes, fds: Sequence[int] = ()) -> bool:
        """Send one message without waiting. Return True if it was sent.

        It is not sent if the channel is full, the other end is gone, or the message is longer than `limit`. The
        other end gets duplicates of the descriptors."""
        if len(message) > LIMIT:
            return False
        try:
            if fds:
                return socket.send_fds(self._socket, [message], list(fds), socket.MSG_NOSIGNAL) == len(message)
            return self._socket.send(message, socket.MSG_NOSIGNAL) == len(message)
        except OSError:
            return False

    def is_closed(self) -> bool:
        """Return True if either end is closed, even if messages are left to receive."""
        poll = select.poll()
        try:
            poll.register(self._socket, 0)  # the kernel reports POLLHUP and POLLERR without being asked
        except ValueError:  # our own end is closed
            return True
        return bool(poll.poll(0))

    def receive(self, wait: float) -> bytes | None:
        """Return the next message, None if there is none within `wait` seconds.

        A message longer than `limit` is cut to one byte more. Descriptors that come with it are closed.
        Raises: ChannelClosed, once all earlier messages have been received."""
        try:
            if wait > 0 and not self._is_readable(wait):
                return None
            message = _despite_reset(lambda: self._socket.recv(LIMIT + 1))
        except BlockingIOError:
            return None
        except (OSError, ValueError) as error:  # ValueError: our own end was closed
            raise ChannelClosed from error
        if not message:
            raise ChannelClosed
        return message

    def receive_with_fds(self, wait: float) -> tuple[bytes, list[int]] | None:
        """Return the next message and its descriptors, which now belong to the caller.

        Raises: ChannelClosed."""
        try:
            if wait > 0 and not self._is_readable(wait):
                return None
            message, fds, _, _ = _despite_reset(
                lambda: socket.recv_fds(self._socket, LIMIT + 1, MOST_FDS, socket.MSG_CMSG_CLOEXEC)
            )
        except BlockingIOError:
            return None
        except (OSError, ValueError) as error:
            raise ChannelClosed from error
        if not message:
            close_all(fds)
            raise ChannelClosed
        return message, list(fds)

    def end(self, receiving: bool = False) -> None:
        """Send nothing more, even if a forked child holds a copy of this end. The other end notices once it has read
        all messages. receiving: receive nothing more either; a thread that waits in `receive` returns."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR if receiving else socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()

    def hang_up(self) -> None:
        """Close the channel for both ends and all their copies; a thread that receives here wakes up."""
        with contextlib.suppress(OSError):  # the other end has hung up already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _is_readable(self, wait: float) -> bool:
        poll = select.poll()  # select() cannot take a descriptor above 1023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(wait * 1000))


def _despite_reset(receive: Callable[[], T]) -> T:
    """Receive. If the other end was closed with unread messages, the kernel reports that once, before the messages that
    it sent itself."""
    try:
        return receive()
    except ConnectionResetError:
        return receive()


def pair() -> tuple[Channel, Channel]:
    """Return both ends of a new channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * LIMIT)
    return Channel(ours), Channel(theirs)


def listen(path: Path) -> socket.socket:
    """Return a socket at `path` that accepts channels from processes of this user. Raises: OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # no process can connect before it listens
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def file_at(place: Path | int) -> tuple[int, int] | None:
    """Return what identifies the file at a path or behind a descriptor while it exists, None if there is none."""
    try:
        status = os.stat(place)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def remove_own_file(path: Path, file: tuple[int, int] | None) -> None:
    """Remove a listener's file, unless another one is at its path now. Call it while the listener is open. file: as
    `file_at` returned it. Raises: OSError."""
    if file is not None and file_at(path) == file:
        path.unlink(missing_ok=True)


def accept(listener: socket.socket) -> Channel | None:
    """Return the next requested channel, None if there is none.

    Raises: OSError if it cannot be accepted, as with too many open files. It still waits then, so the listener stays
    readable: a loop must not ask again at once."""
    try:
        return Channel(listener.accept()[0])
    except (BlockingIOError, ConnectionAbortedError):
        return None


def connect(path: str, limit: float) -> Channel:
    """Return a channel to the process that listens at `path`. Raises: OSError."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.settimeout(limit)
        end.connect(path)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * LIMIT)
    except OSError:
        end.close()
        raise
    return Channel(end)


def close_all(fds: Sequence[int]) -> None:
    """Close unused descriptors."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
