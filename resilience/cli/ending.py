"""Ctrl-C, SIGTERM and a closed terminal all end a command with a screen in the same way, at a safe moment."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt in the body, whichever of the signals arrives."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = [signal.signal(number, end) for number in ENDING_SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(ENDING_SIGNALS, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Let Ctrl-C and its like arrive after the body, not within."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
