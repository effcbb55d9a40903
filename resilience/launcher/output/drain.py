"""Reads what the workers of a node write, and never makes a worker wait.

`python -m resilience.launcher.output.drain LINE LISTENER COUNTS`, three descriptors. LINE is the channel to the agent.
LISTENER is the socket where a monitor requests that a dead worker's last output be in its file. COUNTS is memory where
the agent sees what was passed on.

Each worker has two streams, pipes or terminals, and this process holds the reading ends. Data goes to two places, each
with a thread and a bounded queue: a file in the run folder (`kept`), and the stdout or stderr that this process shares
with the agent (`shown`). A place that takes no data loses output, which is counted, and blocks nobody. This process has
its own session, so a stopped agent does not stop it, and a killed agent loses no output: the process exits when no
stream is open."""

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

from resilience.errors import DecodeError
from resilience.launcher.output.byte_counts import ByteCounts
from resilience.launcher.output.drained_stream import Stream
from resilience.launcher.output.output_files import Keeper
from resilience.launcher.output.streams import (
    Finished,
    FinishStreams,
    OpenStream,
    ProbeDrain,
    Reading,
    StreamClosed,
    StreamLost,
    ToDrain,
    decode_for_drain,
    encode,
)
from resilience.launcher.output.terminal_copy import LONGEST_LINE, PATIENCE, Shower
from resilience.system import channel as lines
from resilience.system import descriptors, titles
from resilience.system.channel import Channel, ChannelClosed, close_all
from resilience.system.processes import ignore_job_signals

MOST_ASKING = 256  # monitors with a pending request
PIPE_CHUNKS = 16  # any user may enlarge a pipe to one megabyte
LINE_LIMIT = 0.05  # seconds that the terminal waits for the rest of a line
STALL = 1.0  # seconds without disk progress before output is dropped
LAST_STALL = 5.0  # seconds of that at the end: no worker waits then, and lost output stays lost
LOOK = 0.005  # seconds between polls of a full queue
TICK = 1.0  # seconds between checks of the terminal's size
FINISH_LIMIT = 15.0  # seconds for a slow reader to take the rest
REPLACE_LIMIT = 2.0  # seconds for that if another process waits for the streams
REST = 0.1  # seconds without connections, if one cannot be accepted


class Drain:
    """The drain process. `run` returns when it should exit."""

    def __init__(self, line: Channel, listener: socket.socket, counts: ByteCounts) -> None:
        self._line, self._listener, self._counts = line, listener, counts
        self._streams: dict[int, Stream] = {}  # by descriptor
        self._asking: dict[int, Channel] = {}  # monitors, by descriptor
        self._keeper = Keeper(self._tell)
        self._showers = {number: Shower(number, self._tell) for number in (1, 2)}
        self._poll = select.poll()
        for end in (line.fileno(), listener.fileno()):
            self._poll.register(end, select.POLLIN)
        self._is_polling_streams = True
        self._finish_by: float | None = None  # deadline for slow readers
        self._patience = PATIENCE
        self._has_finished = False
        self._has_agent = True
        self._must_be_replaced = False  # a stream came without its descriptor
        self._tick_at = 0.0
        self._accepts_at: float | None = None  # no monitor is accepted until then; None: now

    def run(self) -> bool:
        """Drain until no stream is left and the agent needs nothing more. Return False if another process must take
        over all streams earlier: the kernel dropped the descriptor of one, because this process has too many."""
        while not self._is_over():
            self._throttle()
            ready = self._poll.poll(self._timeout() * 1000)
            now = time.monotonic()
            self._end_rest(now)
            for fd, _ in ready:
                if fd in self._streams:
                    self._read(self._streams[fd], now)
                elif fd == self._listener.fileno():
                    self._accept()
                elif fd in self._asking:
                    self._answer(fd)
                elif self._has_agent:
                    self._hear()
            self._show_partial_lines(now)
            self._copy_terminal_size(now)
            if self._must_be_replaced:
                self._write_out()
                return False
            self._check_finish()
        if not self._has_agent:
            self._remove_socket()
        return True

    def _write_out(self) -> None:
        """Pass on what was read, and read nothing more: the streams belong to the next process."""
        self._show_partial_lines(0.0, is_last=True)
        deadline = time.monotonic() + REPLACE_LIMIT
        while not self._is_passed_on(deadline):
            time.sleep(LOOK)
        self._settle()

    def _remove_socket(self) -> None:
        """Remove the socket and its folder in place of the agent."""
        path = Path(self._listener.getsockname())
        with contextlib.suppress(OSError):
            path.unlink()
            path.parent.rmdir()

    # -- streams --------------------------------------------------------------------------------

    def _read(self, stream: Stream, now: float) -> bool:
        """Read a stream's available data; return True if there was any."""
        data = stream.read()
        if data is None:
            self._close(stream)
            return False
        if data:
            self._keeper.take(stream, data, is_stalled=self._keeper.stalled_for(now) >= STALL)
            self._show(stream, data, now)
        return bool(data)

    def _show(self, stream: Stream, data: bytes, now: float) -> None:
        """Pass whole lines to the terminal, so lines of workers do not mix; a partial line waits briefly."""
        if not stream.to:
            return
        data = stream.partial_line + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(data) > LONGEST_LINE:
            end = len(data)
        if not stream.partial_line or end:
            stream.partial_since = now
        stream.partial_line = data[end:]
        if end:
            self._showers[stream.to].take(stream, data[:end])

    def _show_partial_lines(self, now: float, is_last: bool = False) -> None:
        for stream in self._streams.values():
            if stream.partial_line and (is_last or now - stream.partial_since >= LINE_LIMIT):
                self._showers[stream.to].take(stream, stream.partial_line)
                stream.partial_line = b""

    def _close(self, stream: Stream) -> None:
        """Close a stream at its end: no process can write to it."""
        if stream.partial_line:
            self._showers[stream.to].take(stream, stream.partial_line)
        if self._is_polling_streams:
            self._poll.unregister(stream.fd)
        del self._streams[stream.fd]
        os.close(stream.fd)
        self._keeper.close(stream)
        self._tell(StreamClosed(stream.number))

    def _throttle(self) -> None:
        """Read no faster than the disk writes, as long as the disk makes progress."""
        now = time.monotonic()
        may_read = not self._keeper.is_full or self._keeper.stalled_for(now) >= STALL
        if may_read != self._is_polling_streams:
            self._is_polling_streams = may_read
            for fd in self._streams:
                if may_read:
                    self._poll.register(fd, select.POLLIN)
                else:
                    self._poll.unregister(fd)

    def _timeout(self) -> float:
        if not self._is_polling_streams:
            return LOOK
        is_finishing = self._finish_by is not None and not self._has_finished
        if is_finishing or any(stream.partial_line for stream in self._streams.values()):
            return LINE_LIMIT / 2
        return TICK if self._accepts_at is None else REST

    def _copy_terminal_size(self, now: float) -> None:
        """Give the workers' terminals the size of ours."""
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

    def _hear(self) -> bool:
        """Process a message of the agent. Return True if there was one."""
        try:
            received = self._line.receive_with_fds(0.0)
        except ChannelClosed:
            self._has_agent = False
            self._poll.unregister(self._line.fileno())
            self._begin_to_finish(PATIENCE)
            return False
        if received is None:
            return False
        data, fds = received
        try:
            message: ToDrain = decode_for_drain(data)
        except DecodeError:
            close_all(fds)
            return True
        match message:
            case OpenStream():
                if fds:
                    self._open(message, fds[0])
                else:
                    self._must_be_replaced = True
            case ProbeDrain():
                self._tell(Reading())
            case FinishStreams(patience):
                self._begin_to_finish(patience)
        return True

    def _open(self, message: OpenStream, fd: int) -> None:
        os.set_blocking(fd, False)
        self._streams[fd] = stream = Stream(message, fd, self._counts)
        self._keeper.open(stream)
        if self._is_polling_streams:
            self._poll.register(fd, select.POLLIN)

    def _tell(self, message: Reading | StreamLost | StreamClosed | Finished) -> None:
        if self._has_agent:
            self._line.send(encode(message))

    # -- the end --------------------------------------------------------------------------------

    def _begin_to_finish(self, patience: float) -> None:
        self._patience = min(self._patience, patience)
        if self._finish_by is None:
            self._read_all()
            self._show_partial_lines(0.0, is_last=True)
            self._finish_by = time.monotonic() + FINISH_LIMIT

    def _read_all(self) -> None:
        """Read all data that the streams hold now: a pipe holds one chunk, unless a program enlarged it."""
        for stream in list(self._streams.values()):
            for _ in range(PIPE_CHUNKS):
                if not self._read(stream, time.monotonic()):
                    break

    def _check_finish(self) -> None:
        """Tell the agent when everything is passed on, or when readers no longer read."""
        if self._finish_by is not None and not self._has_finished and self._is_passed_on(self._finish_by):
            self._has_finished = True
            self._settle()
            self._tell(Finished())

    def _settle(self) -> None:
        """Report output that is not passed on."""
        for shower in self._showers.values():
            shower.settle()
        self._keeper.settle()

    def _is_passed_on(self, until: float) -> bool:
        """Return True if files and terminal have received everything that they will take."""
        now = time.monotonic()
        if self._is_writing(now, LAST_STALL if now < until else STALL):
            return False
        busy = [shower for shower in self._showers.values() if not shower.is_idle]
        return now >= until or all(shower.is_stuck(now, self._patience) for shower in busy)

    def _is_writing(self, now: float, longest_stall: float) -> bool:
        """Return True if data waits for a disk that has made progress within so many seconds."""
        return not self._keeper.is_idle and self._keeper.stalled_for(now) < longest_stall

    def _is_over(self) -> bool:
        if not self._has_finished or self._streams:
            return False
        # A child of a worker may have written until now, long after the agent's end.
        return not self._is_writing(time.monotonic(), LAST_STALL) and self._is_passed_on(self._finish_by or 0.0)

    # -- monitors -------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            asking = lines.accept(self._listener)
        except OSError:  # no descriptor is left: it waits in the listener's queue, and `poll` would not wait
            self._poll.unregister(self._listener.fileno())
            self._accepts_at = time.monotonic() + REST
            return
        if asking is not None and len(self._asking) >= MOST_ASKING:
            asking.close()
        elif asking is not None:
            self._asking[asking.fileno()] = asking
            self._poll.register(asking.fileno(), select.POLLIN)

    def _end_rest(self, now: float) -> None:
        if self._accepts_at is not None and now >= self._accepts_at:
            self._accepts_at = None
            self._poll.register(self._listener.fileno(), select.POLLIN)

    def _answer(self, fd: int) -> None:
        """Answer a monitor as soon as everything that its worker wrote so far is in the files. The agent's message that
        opens one of the worker's streams may still wait, if this process started late or stood still."""
        asking = self._asking.pop(fd)
        self._poll.unregister(fd)
        with contextlib.suppress(ChannelClosed):
            asking.receive(0.0)
            while self._has_agent and self._hear():
                pass
            self._read_all()
            self._keeper.call(_answer_to(asking))


def _answer_to(asking: Channel) -> Callable[[], None]:
    def answer() -> None:
        asking.send(b"kept")
        asking.close()

    return answer


if __name__ == "__main__":
    ignore_job_signals()
    titles.name("res-drain")
    descriptors.raise_limit()
    line_fd, listener_fd, counts_fd = map(int, sys.argv[1:])
    line, listener = (socket.socket(fileno=fd) for fd in (line_fd, listener_fd))
    has_finished = Drain(Channel(line), listener, ByteCounts(counts_fd)).run()
    os._exit(not has_finished)  # threads may hang on a reader that does not read
