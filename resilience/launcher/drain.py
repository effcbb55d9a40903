"""Reads what the workers of a node write, and never lets a worker wait.

`python -m resilience.launcher.drain LINE LISTENER`: LINE is the agent's line, LISTENER the socket at which a monitor
asks that a dead worker's last output is in its file; both are descriptors. Each worker has two streams, pipes or
terminals, whose other ends are here. What is read goes to two places, each with a thread and a bounded queue: a file in
the run folder (`kept`), and the stdout or stderr that this process shares with the agent (`shown`). A place that takes
nothing loses output, which is counted, and holds up nobody. This process is in a session of its own, so a
stopped agent does not stop it, and a killed one loses nothing: it leaves when no stream is open any more."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

from resilience.adapters import channel as lines
from resilience.adapters import descriptors, titles
from resilience.adapters.channel import Channel, ChannelClosed, close_all
from resilience.adapters.processes import ignore_job_signals
from resilience.errors import DecodeError
from resilience.launcher.kept import Keeper
from resilience.launcher.shown import LONGEST_LINE, Shower
from resilience.launcher.streams import (
    Closed,
    Finish,
    Finished,
    Lost,
    Open,
    Probe,
    Reading,
    decode_for_drain,
    encode,
)

CHUNK = 1 << 16  # bytes read at once: what a pipe holds
MOST_ASKING = 256  # monitors that ask at the same time
PIPE_CHUNKS = 16  # a pipe may be enlarged to a megabyte by any user
LINE_LIMIT = 0.05  # seconds that the terminal waits for the rest of a line
STALL = 1.0  # seconds in which the disk takes nothing before output is dropped
LOOK = 0.005  # seconds between looks at a queue that is full
TICK = 1.0  # seconds between looks at the size of the terminal
FINISH_LIMIT = 15.0  # seconds in which a slow reader may take what is left


class Stream:
    """One worker's stdout or stderr."""

    def __init__(self, opened: Open, fd: int) -> None:
        self.number, self.to, self.fd = opened.number, opened.to, fd
        self.name, self.path, self.limit = opened.name, opened.path, opened.limit
        self.rest = b""  # the beginning of a line that the terminal has not got
        self.rest_since = 0.0
        self.is_terminal = os.isatty(fd)

    def read(self) -> bytes | None:
        """Return what there is to read, None at the end."""
        try:
            return os.read(self.fd, CHUNK) or None
        except BlockingIOError:
            return b""
        except OSError:  # EIO: nobody has the terminal's other end any more
            return None


class Drain:
    """The process. `run` returns when it is to end."""

    def __init__(self, line: Channel, listener: socket.socket) -> None:
        self._line, self._listener = line, listener
        self._streams: dict[int, Stream] = {}  # by descriptor
        self._asking: dict[int, Channel] = {}  # monitors, by descriptor
        self._keeper = Keeper(self._tell)
        self._showers = {number: Shower(number, self._tell) for number in (1, 2)}
        self._poll = select.poll()
        for end in (line.fileno(), listener.fileno()):
            self._poll.register(end, select.POLLIN)
        self._is_polling_streams = True
        self._finish_by: float | None = None  # until then a slow reader may take what is left
        self._has_finished = False
        self._has_agent = True
        self._tick_at = 0.0

    def run(self) -> None:
        """Drain until there is nothing more to drain, and the agent wants nothing more."""
        while not self._is_over():
            self._pace()
            ready = self._poll.poll(self._timeout() * 1000)
            now = time.monotonic()
            for fd, _ in ready:
                if fd in self._streams:
                    self._read(self._streams[fd], now)
                elif fd == self._listener.fileno():
                    self._accept()
                elif fd in self._asking:
                    self._answer(fd)
                elif self._has_agent:
                    self._hear()
            self._show_rests(now)
            self._look_at_size(now)
            self._look_at_finish()
        if not self._has_agent:
            self._tidy()

    def _tidy(self) -> None:
        """Remove what the agent would have: the socket and its folder."""
        path = Path(self._listener.getsockname())
        with contextlib.suppress(OSError):
            path.unlink()
            path.parent.rmdir()

    # -- streams --------------------------------------------------------------------------------

    def _read(self, stream: Stream, now: float) -> bool:
        """Take what a stream has; answers whether there was anything."""
        data = stream.read()
        if data is None:
            self._close(stream)
            return False
        if data:
            self._keeper.take(stream, data, is_stalled=self._keeper.stalled_for(now) >= STALL)
            self._show(stream, data, now)
        return bool(data)

    def _show(self, stream: Stream, data: bytes, now: float) -> None:
        """Pass whole lines on to the terminal, so that lines of several workers do not mix; a rest waits a moment."""
        if not stream.to:
            return
        data = stream.rest + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(data) > LONGEST_LINE:
            end = len(data)
        if not stream.rest or end:
            stream.rest_since = now
        stream.rest = data[end:]
        if end:
            self._showers[stream.to].take(stream, data[:end])

    def _show_rests(self, now: float, is_last: bool = False) -> None:
        for stream in self._streams.values():
            if stream.rest and (is_last or now - stream.rest_since >= LINE_LIMIT):
                self._showers[stream.to].take(stream, stream.rest)
                stream.rest = b""

    def _close(self, stream: Stream) -> None:
        """The stream is at its end: nobody can write to it any more."""
        if stream.rest:
            self._showers[stream.to].take(stream, stream.rest)
        if self._is_polling_streams:
            self._poll.unregister(stream.fd)
        del self._streams[stream.fd]
        os.close(stream.fd)
        self._keeper.close(stream)
        self._tell(Closed(stream.number))

    def _pace(self) -> None:
        """Read no faster than the disk takes it, as long as it takes anything."""
        now = time.monotonic()
        wants = not self._keeper.is_full or self._keeper.stalled_for(now) >= STALL
        if wants != self._is_polling_streams:
            self._is_polling_streams = wants
            for fd in self._streams:
                if wants:
                    self._poll.register(fd, select.POLLIN)
                else:
                    self._poll.unregister(fd)

    def _timeout(self) -> float:
        if not self._is_polling_streams:
            return LOOK
        is_finishing = self._finish_by is not None and not self._has_finished
        if is_finishing or any(stream.rest for stream in self._streams.values()):
            return LINE_LIMIT / 2
        return TICK

    def _look_at_size(self, now: float) -> None:
        """Workers' terminals are as large as ours."""
        if now < self._tick_at:
            return
        self._tick_at = now + TICK
        for stream in self._streams.values():
            if stream.is_terminal:
                with contextlib.suppress(OSError):
                    size = fcntl.ioctl(stream.to, termios.TIOCGWINSZ, bytes(8))
                    if size != fcntl.ioctl(stream.fd, termios.TIOCGWINSZ, bytes(8)):
                        fcntl.ioctl(stream.fd, termios.TIOCSWINSZ, size)

    # -- the agent ------------------------------------------------------------------------------

    def _hear(self) -> None:
        try:
            received = self._line.receive_with_fds(0.0)
        except ChannelClosed:
            self._has_agent = False
            self._poll.unregister(self._line.fileno())
            self._begin_to_finish()
            return
        if received is None:
            return
        data, fds = received
        try:
            message = decode_for_drain(data)
        except DecodeError:
            close_all(fds)
            return
        match message:
            case Open() if fds:
                self._open(message, fds[0])
            case Probe():
                self._tell(Reading())
            case Finish():
                self._begin_to_finish()

    def _open(self, opened: Open, fd: int) -> None:
        os.set_blocking(fd, False)
        self._streams[fd] = stream = Stream(opened, fd)
        self._keeper.open(stream)
        if self._is_polling_streams:
            self._poll.register(fd, select.POLLIN)

    def _tell(self, message: Reading | Lost | Closed | Finished) -> None:
        if self._has_agent:
            self._line.send(encode(message))

    # -- the end --------------------------------------------------------------------------------

    def _begin_to_finish(self) -> None:
        if self._finish_by is None:
            self._read_all()
            self._show_rests(0.0, is_last=True)
            self._finish_by = time.monotonic() + FINISH_LIMIT

    def _read_all(self) -> None:
        """Take all that streams have now: a pipe holds one chunk, unless somebody has enlarged it."""
        for stream in list(self._streams.values()):
            for _ in range(PIPE_CHUNKS):
                if not self._read(stream, time.monotonic()):
                    break

    def _look_at_finish(self) -> None:
        """Let the agent leave when all is passed on, or nothing more will be taken."""
        if self._finish_by is not None and not self._has_finished and self._is_passed_on(self._finish_by):
            self._has_finished = True
            for shower in self._showers.values():
                shower.settle()
            self._keeper.settle()
            self._tell(Finished())

    def _is_passed_on(self, until: float) -> bool:
        """Return True if files and terminal have everything that they will take."""
        now = time.monotonic()
        if not self._keeper.is_idle and self._keeper.stalled_for(now) < STALL:
            return False
        busy = [shower for shower in self._showers.values() if not shower.is_idle]
        return now >= until or all(shower.is_stuck(now) for shower in busy)

    def _is_over(self) -> bool:
        return self._has_finished and not self._streams and self._is_passed_on(self._finish_by or 0.0)

    # -- monitors -------------------------------------------------------------------------------

    def _accept(self) -> None:
        asking = lines.accept(self._listener)
        if asking is not None and len(self._asking) >= MOST_ASKING:
            asking.close()
        elif asking is not None:
            self._asking[asking.fileno()] = asking
            self._poll.register(asking.fileno(), select.POLLIN)

    def _answer(self, fd: int) -> None:
        """A monitor wants its worker's output to be in the files, as far as it was written by now."""
        asking = self._asking.pop(fd)
        self._poll.unregister(fd)
        with contextlib.suppress(ChannelClosed):
            asking.receive(0.0)
            self._read_all()
            self._keeper.call(_answering(asking))


def _answering(asking: Channel) -> Callable[[], None]:
    def answer() -> None:
        asking.send(b"kept")
        asking.close()

    return answer


if __name__ == "__main__":
    ignore_job_signals()
    titles.name("res-drain")
    descriptors.raise_limit()
    agent, own = int(sys.argv[1]), int(sys.argv[2])
    Drain(Channel(socket.socket(fileno=agent)), socket.socket(fileno=own)).run()
    os._exit(0)  # threads may be held by a reader that does not read
