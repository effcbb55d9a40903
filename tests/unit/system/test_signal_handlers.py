"""A signal whose handler raised in our code is reported, then raised again."""

from __future__ import annotations

import faulthandler
import functools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resilience.system.signal_handlers import Deferred, ProgramHandlers, is_from_signal


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


class Interruption(BaseException):
    pass


def leave(_: int, frame: object) -> None:
    raise SystemExit(143)


def cut(_: int, frame: object) -> None:
    raise Interruption


class Stopping:
    def __call__(self, number: int, frame: object) -> None:
        leave(number, frame)

    def stop(self, number: int, frame: object) -> None:
        leave(number, frame)


HANDLERS = [
    leave,
    functools.partial(leave, 10),
    Stopping(),
    Stopping().stop,
    lambda number, frame: leave(number, frame),
]


@pytest.mark.parametrize("handler", HANDLERS, ids=["function", "partial", "object", "method", "lambda"])
def test_exception_that_left_a_handler_of_the_function_ends_its_rank(handler: Any) -> None:
    handlers = ProgramHandlers(lambda: True, Interruption)
    signal.signal(signal.SIGUSR1, handler)
    handlers.note()
    assert signal.getsignal(signal.SIGUSR1) is handler
    with pytest.raises(SystemExit) as raised:
        handler(*([] if isinstance(handler, functools.partial) else [signal.SIGUSR1]), None)
    replacement = Interruption()
    replacement.__context__ = raised.value
    assert not is_from_signal(raised.value)
    handlers.judge(replacement)
    assert is_from_signal(raised.value) and not is_from_signal(replacement)


@pytest.mark.parametrize("is_guarded", [False, True])
def test_handler_that_the_interruption_cut_short_is_called_again(is_guarded: bool) -> None:
    handlers = ProgramHandlers(lambda: True, Interruption)
    signal.signal(signal.SIGUSR1, cut)
    (handlers.guard if is_guarded else handlers.note)()
    with pytest.raises(Interruption) as raised:
        signal.raise_signal(signal.SIGUSR1)
    handlers.judge(raised.value)
    assert handlers.are_put_off
    with pytest.raises(Interruption):
        handlers.raise_again()
    assert handlers.are_put_off  # it was cut short once more
    assert [deferred.signal for deferred in handlers.take_deferred()] == ["SIGUSR1"]
    handlers.release()


def test_code_of_handlers_is_known() -> None:
    handlers = ProgramHandlers(lambda: True)
    assert not handlers.is_handler(leave.__code__)
    signal.signal(signal.SIGUSR1, leave)
    handlers.note()
    assert handlers.is_handler(leave.__code__)
    handlers.guard()
    assert not handlers.is_handler(leave.__code__)  # its guard calls it
    guarded: Any = signal.getsignal(signal.SIGUSR1)
    assert handlers.is_handler(type(guarded).__call__.__code__)
    handlers.release()


def test_faulthandler_that_calls_a_handler_of_the_program_stays(raised: list[int], tmp_path: Path) -> None:
    handlers = ProgramHandlers(lambda: True)
    path = tmp_path / "stacks"
    with path.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, chain=True)
        try:
            handlers.guard()
            signal.raise_signal(signal.SIGUSR1)
            handlers.release()
            signal.raise_signal(signal.SIGUSR1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert raised == [signal.SIGUSR1] * 2
    assert path.read_text().count("Current thread") == 2
