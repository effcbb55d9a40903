"""A terminal of which all is ours for a while, and which is as before afterwards, whatever ends it.

`Screen` draws whole frames in place and waits for keys; Ctrl-C, SIGTERM, a closed terminal and an exception leave the
terminal as it was, Ctrl-Z too, and `fg` brings the screen back."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TextIO

from resilience.cli.ending import ended_by_signals, signals_deferred
from resilience.cli.render import Line, cut_line, may_paint, painted

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[?25h\x1b[?1049l"  # the other screen, without a cursor
_TOKEN = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|\x1b|.", re.DOTALL)
_NAMES = {
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\b": "backspace",
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b[5~": "pageup",
    "\x1b[6~": "pagedown",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1bOH": "home",
    "\x1bOF": "end",
    "\x1b[1~": "home",
    "\x1b[4~": "end",
}


def is_possible() -> bool:
    """Whether there is a person with a terminal that can be drawn on."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def keys_of(text: str) -> list[str]:
    """Return the names of the keys that a terminal has sent; of one that is not known the empty name."""
    found = []
    for token in _TOKEN.findall(text):
        name = _NAMES.get(token, token)
        found.append(name if name in _NAMES.values() or (len(name) == 1 and name.isprintable()) else "")
    return found


class Screen:
    """The terminal, while in `taken`. Main thread only."""

    def __init__(self, stdin: int, stream: TextIO) -> None:
        self._stdin, self._stream = stdin, stream
        self._paint = may_paint(stream)
        self._before = termios.tcgetattr(stdin)
        self._wake_read, self._wake_write = os.pipe()

    @classmethod
    @contextmanager
    def taken(cls) -> Iterator[Screen]:
        """Have the terminal to oneself. Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt in the body."""
        screen = cls(sys.stdin.fileno(), sys.stdout)
        with ended_by_signals():
            before = {number: signal.getsignal(number) for number in (signal.SIGWINCH, signal.SIGTSTP)}
            os.set_blocking(screen._wake_write, False)
            wakes = signal.set_wakeup_fd(screen._wake_write, warn_on_full_buffer=False)
            try:
                signal.signal(signal.SIGWINCH, lambda *_: None)  # it wakes `keys`, and the next frame has the new size
                signal.signal(signal.SIGTSTP, screen._stop)
                screen._enter()
                yield screen
            finally:
                screen._leave()
                signal.set_wakeup_fd(wakes)
                for number, handler in before.items():
                    signal.signal(number, handler)
                os.close(screen._wake_read)
                os.close(screen._wake_write)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines at this moment; what the environment says of them is that of the shell's start."""
        try:
            columns, lines = os.get_terminal_size(self._stream.fileno())
        except OSError:
            columns, lines = 0, 0
        return columns or 80, lines or 24

    def draw(self, lines: Iterable[Line]) -> None:
        """Replace what is shown, without a flicker."""
        columns, _ = self.size
        # Each is cleared before it is written: behind a full line the cursor stands on its last character.
        rows = "\r\n".join(f"\x1b[2K{painted(cut_line(line, columns), self._paint)}" for line in lines)
        self._write(f"\x1b[H{rows}\x1b[?25l")

    def wake(self) -> None:
        """End the present wait for keys, from any thread: there is something new to draw."""
        with suppress(OSError):  # it is full, and wakes as it is
            os.write(self._wake_write, b"\0")

    def keys(self, timeout: float) -> Sequence[str]:
        """Wait for keys, another size, a `wake`, or `timeout` seconds. Raises: EOFError without a terminal."""
        ready, _, _ = select.select([self._stdin, self._wake_read], [], [], max(0.0, timeout))
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        if self._stdin not in ready:
            return ()
        sent = os.read(self._stdin, 4096)
        if not sent:
            raise EOFError
        return keys_of(sent.decode(errors="ignore"))

    # -- coming and going -----------------------------------------------------------------------

    def _enter(self) -> None:
        tty.setcbreak(self._stdin, termios.TCSADRAIN)  # keys come one by one, and Ctrl-C stays a signal
        self._write(_ENTER)

    def _leave(self) -> None:
        with signals_deferred(), suppress(OSError, termios.error):  # the terminal may be gone
            self._write(_LEAVE)
            termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._before)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: give the terminal back, stop, and take it again when told to go on."""
        self._leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTSTP])
        os.kill(os.getpid(), signal.SIGTSTP)
        time.sleep(0)  # here the process stands still
        signal.signal(signal.SIGTSTP, self._stop)
        self._enter()

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
