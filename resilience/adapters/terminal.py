"""How is something said to a reader who may not read?  Piece by piece, as far as it goes until a moment.

A pipe that nobody empties, and a terminal that is held (Ctrl-S), take nothing more; whoever writes to them
as usual stands still until they do. Before each piece we ask whether it would be taken. A pipe is shared with
others who write, who may take the room in between: it is opened once more, not to wait, where that can be."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import stat
import time

STDOUT, STDERR = 1, 2
PIECE = 4096  # bytes that a pipe with any room takes in one piece (POSIX, PIPE_BUF)


@functools.cache
def stream(descriptor: int) -> int:
    """Return a descriptor for this process's stdout or stderr: of the same pipe, but its writes never wait; the same
    one for anything else."""
    return _without_waiting(descriptor)


def _without_waiting(descriptor: int) -> int:
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        pass  # another user's pipe, or none at all
    return descriptor


def say(stream: object, text: str) -> None:
    """Write text to a text stream, such as sys.stderr, as far as its reader takes it now; never raises.

    A stream without a descriptor is not a terminal's or a pipe's, and is written to as usual."""
    try:
        number = stream.fileno()  # type: ignore[attr-defined]
    except (OSError, ValueError, AttributeError):  # none at all, closed, or an object of the user's
        with contextlib.suppress(Exception):
            stream.write(text)  # type: ignore[attr-defined]
        return
    own = number
    with contextlib.suppress(OSError):
        own = _without_waiting(number)  # each time: the user may have led the stream elsewhere
        put(own, text.encode(errors="backslashreplace"), time.monotonic())
    if own != number:
        os.close(own)


def path_of_stderr() -> str:
    """Return the path of the terminal that this process's stderr is, empty if it is none."""
    try:
        return os.ttyname(STDERR) if os.isatty(STDERR) else ""
    except OSError:
        return ""


def say_at(path: str, text: str) -> None:
    """Write text to a terminal, as far as it takes it now; never raises. For a process that does not keep it open."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if os.isatty(descriptor):
                put(descriptor, text.encode(errors="backslashreplace"), time.monotonic())
        finally:
            os.close(descriptor)


def put(descriptor: int, data: bytes, until: float) -> int:
    """Write; answers how many bytes were taken. until: on the monotonic clock; what is ready is taken even after it.

    Less than all: nobody reads, or nobody is there."""
    ready = select.poll()
    ready.register(descriptor, select.POLLOUT)
    taken = 0
    while taken < len(data):
        try:
            if not ready.poll(max(0.0, until - time.monotonic()) * 1000):
                break
            taken += os.write(descriptor, data[taken : taken + PIECE])
        except BlockingIOError:
            if time.monotonic() >= until:  # no room for the whole piece
                break
        except OSError:
            break
    return taken
