"""Makes Ctrl-C, SIGTERM and a closed terminal end a full-screen command in the same way, at a safe moment."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt in the body when one of the signals arrives."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous_handlers = [signal.signal(number, end) for number in ENDING_SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(ENDING_SIGNALS, previous_handlers, strict=True):
            signal.signal(number, handler)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer the ending signals until after the body."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)  # calls handlers of earlier signals, which raise
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
