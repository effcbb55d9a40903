"""When the main thread proves that it runs bytecode."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from resilience.inprocess._runtime import progress


class CountingPage:
    """Counts proofs of life."""

    ticks = 0

    def tick(self) -> None:
        self.ticks += 1


@pytest.fixture(autouse=True)
def no_request() -> Iterator[None]:
    progress.forget_request()
    yield
    progress.forget_request()


def request(page: CountingPage, times: int) -> None:
    """Request proofs of life in another thread, as the ticker does, and let the main thread run after each request."""
    for _ in range(times):
        thread = threading.Thread(target=progress.request_tick, args=(page,))
        thread.start()
        thread.join()
        for _ in range(100):
            pass


def test_each_request_gets_its_proof_of_life_by_the_next_one() -> None:
    page = CountingPage()
    request(page, 4)
    assert page.ticks in (3, 4)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signal_handler_cannot_raise_within_a_proof_of_life() -> None:
    def raise_within(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename == progress.__file__:
            raise InterruptedError("by schedule")

    page, tracing = CountingPage(), sys.gettrace()
    sys.settrace(raise_within)  # of this thread only
    try:
        request(page, 4)
    finally:
        sys.settrace(tracing)
    assert page.ticks in (3, 4)


def test_blocked_main_thread_does_not_fill_the_queue_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def never_run(*call: object) -> int:
        asked.append(call)
        return 0

    monkeypatch.setattr(progress, "_add_pending_call", never_run, raising=False)
    for _ in range(100):
        progress.request_tick(CountingPage())  # type: ignore[arg-type]
    assert len(asked) == 1


def test_request_is_repeated_if_the_queue_of_the_interpreter_was_full(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(progress, "_add_pending_call", lambda *_: -1, raising=False)
        request(CountingPage(), 1)
    page = CountingPage()
    request(page, 2)
    assert page.ticks in (1, 2)
