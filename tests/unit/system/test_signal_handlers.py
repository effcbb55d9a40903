"""A signal whose handler raised in our code is reported, then raised again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from resilience.system.signal_handlers import Deferred, ProgramHandlers


@pytest.fixture
def raised() -> list[int]:
    return []


@pytest.fixture(autouse=True)
def handler(raised: list[int]) -> Iterator[None]:
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: raised.append(number))
    yield
    signal.signal(signal.SIGUSR1, previous)


def test_signal_that_was_put_off_many_times_is_reported_once_and_raised_once(raised: list[int]) -> None:
    handlers = ProgramHandlers(lambda: True)
    for _ in range(1000):
        handlers.put_off(signal.SIGUSR1, signal.getsignal(signal.SIGUSR1), RuntimeError("a process is lost"))
    assert handlers.take_deferred() == [Deferred("SIGUSR1", "RuntimeError: a process is lost")]
    assert handlers.take_deferred() == []
    handlers.raise_again()
    handlers.raise_again()
    assert raised == [signal.SIGUSR1]


def test_deferred_signal_is_raised_again_and_still_reported_later(
    raised: list[int],
) -> None:
    handlers = ProgramHandlers(lambda: True)
    handlers.put_off(signal.SIGUSR1, signal.getsignal(signal.SIGUSR1), RuntimeError())
    handlers.raise_again()
    assert raised == [signal.SIGUSR1]
    assert len(handlers.take_deferred()) == 1


def test_handler_that_the_program_kept_from_an_earlier_call_is_guarded_by_the_present_one() -> None:
    plain = signal.getsignal(signal.SIGUSR1)
    earlier, present = ProgramHandlers(lambda: True), ProgramHandlers(lambda: True)
    earlier.guard(signal.SIGRTMIN)
    kept = signal.getsignal(signal.SIGUSR1)
    earlier.release()
    signal.signal(signal.SIGUSR1, kept)
    present.guard(signal.SIGRTMIN)
    guarded: Any = signal.getsignal(signal.SIGUSR1)
    present.guard(signal.SIGRTMIN)
    assert signal.getsignal(signal.SIGUSR1) is guarded
    assert (guarded.owner, guarded.handler) == (present, plain)
    present.release()
    assert signal.getsignal(signal.SIGUSR1) is plain
