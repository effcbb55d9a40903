"""How is text printed for a reader that may not read?  Piece by piece, until a deadline.

A pipe without a reader and a held terminal (Ctrl-S) accept no more data; an ordinary write to them blocks. Before each
piece this module asks whether it would be accepted. Other writers share a pipe and may take its room in between: so the
pipe is reopened in non-blocking mode, if that is possible."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import stat
import time

STDOUT, STDERR = 1, 2
PIECE = 4096  # bytes that a pipe with any room accepts in one piece (POSIX, PIPE_BUF)


@functools.cache
def stream(descriptor: int) -> int:
    """Return a non-blocking descriptor for the pipe of this process's stdout or stderr; the given descriptor if it is
    not a pipe."""
    return _without_waiting(descriptor)


def _without_waiting(descriptor: int) -> int:
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        pass  # another user's pipe, or not a descriptor
    return descriptor


def say(stream: object, text: str) -> None:
    """Write text to a text stream, such as sys.stderr, as far as its reader accepts it now; never raises.

    A stream without a descriptor is neither a terminal nor a pipe, and is written to as usual."""
    number = _descriptor_of(stream)
    if number is None:
        with contextlib.suppress(Exception):
            stream.write(text)  # type: ignore[attr-defined]
        return
    writable = number
    with contextlib.suppress(Exception):  # a user's object may return any number
        writable = _without_waiting(number)  # each time: the user may have redirected the stream
        put(writable, text.encode(errors="backslashreplace"), time.monotonic())
    if writable != number:
        os.close(writable)


def _descriptor_of(stream: object) -> int | None:
    """Return the descriptor of a text stream, None if it has none: a user's object may raise or return anything."""
    try:
        number = stream.fileno()  # type: ignore[attr-defined]
    except Exception:
        return None
    return number if isinstance(number, int) and number >= 0 else None


def path_of_stderr() -> str:
    """Return the path of the terminal of this process's stderr, empty if it is not a terminal."""
    try:
        return os.ttyname(STDERR) if os.isatty(STDERR) else ""
    except OSError:
        return ""


def say_at(path: str, text: str) -> None:
    """Write text to a terminal, as far as it accepts it now; never raises. Opens and closes it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if os.isatty(descriptor):
                put(descriptor, text.encode(errors="backslashreplace"), time.monotonic())
        finally:
            os.close(descriptor)


def put(descriptor: int, data: bytes, until: float) -> int:
    """Write data, and return how many bytes were accepted. until: monotonic seconds; a ready reader accepts even later.

    Fewer bytes than given mean that there is no reader, or that it does not read."""
    return put_or_say_why(descriptor, data, until)[0]


def put_or_say_why(descriptor: int, data: bytes, until: float) -> tuple[int, str]:
    """Do the same; also return the error that ended it, empty if there was none: then the reader does not read."""
    ready = select.poll()
    ready.register(descriptor, select.POLLOUT)
    written = 0
    while written < len(data):
        try:
            if not ready.poll(max(0.0, until - time.monotonic()) * 1000):
                break
            written += os.write(descriptor, data[written : written + PIECE])
        except BlockingIOError:
            if time.monotonic() >= until:  # no room for the whole piece
                break
        except OSError as error:
            return written, error.strerror or str(error)
    return written, ""
