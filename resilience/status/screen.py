"""A full-screen terminal view that always restores the terminal.

`Screen` draws whole frames in place and waits for keys. Ctrl-C, Ctrl-Z, SIGTERM, a closed terminal and an exception
restore the terminal; `fg` brings the screen back."""

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

from resilience.system.exit_signals import ended_by_signals, signals_deferred
from resilience.system.render import Line, cut_line, may_paint, painted

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[?25h\x1b[?1049l"  # the alternate screen, without a cursor
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
    """Return True if stdin and stdout are a terminal that supports drawing."""
    return (
        sys.stdin is not None
        and sys.stdin.isatty()
        and sys.stdout.isatty()
        and os.environ.get("TERM", "dumb") != "dumb"
    )


def keys_of(text: str) -> list[str]:
    """Return the names of the keys that a terminal sent; "" for an unknown key."""
    names = []
    for token in _TOKEN.findall(text):
        name = _NAMES.get(token, token)
        names.append(name if name in _NAMES.values() or (len(name) == 1 and name.isprintable()) else "")
    return names


class Screen:
    """The terminal, in the body of `taken`. Main thread only."""

    def __init__(self, stdin: int, stream: TextIO) -> None:
        self._stdin, self._stream = stdin, stream
        self._paint = may_paint(stream)
        self._before = termios.tcgetattr(stdin)
        self._wake_read, self._wake_write = os.pipe()

    @classmethod
    @contextmanager
    def taken(cls) -> Iterator[Screen]:
        """Take over the terminal. Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt in the body."""
        screen = cls(sys.stdin.fileno(), sys.stdout)
        with ended_by_signals():
            previous_handlers = {number: signal.getsignal(number) for number in (signal.SIGWINCH, signal.SIGTSTP)}
            os.set_blocking(screen._wake_write, False)
            wakes = signal.set_wakeup_fd(screen._wake_write, warn_on_full_buffer=False)
            try:
                signal.signal(
                    signal.SIGWINCH, lambda *_: None
                )  # the signal wakes `keys`; the next frame has the new size
                signal.signal(signal.SIGTSTP, screen._stop)
                screen._enter()
                yield screen
            finally:
                screen._leave()
                signal.set_wakeup_fd(wakes)
                for number, handler in previous_handlers.items():
                    signal.signal(number, handler)
                os.close(screen._wake_read)
                os.close(screen._wake_write)

    @property
    def size(self) -> tuple[int, int]:
        """Return the present columns and lines. COLUMNS and LINES only hold the size at the start of the shell."""
        try:
            columns, lines = os.get_terminal_size(self._stream.fileno())
        except OSError:
            columns, lines = 0, 0
        return columns or 80, lines or 24

    def draw(self, lines: Iterable[Line]) -> None:
        """Replace the contents of the screen without flicker."""
        columns, _ = self.size
        # Clear each line before writing it: after a full line, the cursor stays on the last character.
        rows = "\r\n".join(f"\x1b[2K{painted(cut_line(line, columns), self._paint)}" for line in lines)
        self._write(f"\x1b[H{rows}\x1b[?25l")

    def wake(self) -> None:
        """End the current wait for keys, because there is something new to draw. Any thread may call it."""
        with suppress(OSError):  # the pipe is full, so `keys` wakes anyway
            os.write(self._wake_write, b"\0")

    def keys(self, timeout: float) -> Sequence[str]:
        """Wait for keys, a new size, a `wake`, or `timeout` seconds. Raises: EOFError if the terminal is closed."""
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
        tty.setcbreak(self._stdin, termios.TCSADRAIN)  # keys arrive one by one, and Ctrl-C stays a signal
        self._write(_ENTER)

    def _leave(self) -> None:
        with signals_deferred(), suppress(OSError, termios.error):  # the terminal may be gone
            self._write(_LEAVE)
            termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._before)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-Z: restore the terminal, stop the process, and take the terminal again after `fg`."""
        self._leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTSTP])
        os.kill(os.getpid(), signal.SIGTSTP)
        time.sleep(0)  # the process is stopped here
        signal.signal(signal.SIGTSTP, self._stop)
        self._enter()

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
