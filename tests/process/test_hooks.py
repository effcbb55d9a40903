"""Hooks that run something beside the main thread give it its time and no more."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from resilience.errors import ConfigurationError, ConfigurationTypeError, TimeoutError
from resilience.facts import events
from resilience.facts.seats import Seat
from resilience.inprocess.finalize import ThreadedFinalize
from resilience.inprocess.health_check import CudaHealthCheck
from resilience.inprocess.hook_store import CallStore, IterationStore
from resilience.inprocess.state import State
from resilience.system.health import cuda
from tests.support.ranks import Job

SHORT = timedelta(seconds=0.05)
LONG = timedelta(seconds=60)
STATE = State(rank=0, world_size=1)


@pytest.fixture
def hang() -> Iterator[Callable[..., None]]:
    """A function that returns when the test is over."""
    over = threading.Event()
    yield lambda *_: (over.wait(60), None)[1]
    over.set()


# -- ThreadedFinalize ---------------------------------------------------------------------------------


def test_function_gets_its_arguments_in_a_thread_of_its_own() -> None:
    called: list[Any] = []

    def clean(*args: Any, **kwargs: Any) -> None:
        called.append((args, kwargs, threading.current_thread() is threading.main_thread()))

    error = ValueError()
    assert ThreadedFinalize(LONG, clean, (1, 2), {"a": 3})(STATE, error) == (STATE, error)
    assert ThreadedFinalize(LONG, clean, None, None)(STATE, None) == (STATE, None)
    assert called == [((1, 2), {"a": 3}, False), ((), {}, False)]


def test_function_that_hangs_is_left_behind(hang: Callable[..., None]) -> None:
    with pytest.raises(TimeoutError, match=r"did not return within 0.05 s") as raised:
        ThreadedFinalize(SHORT, hang)(STATE, None)
    assert vars(raised.value)["limit"] == SHORT


@pytest.mark.parametrize("error", [KeyError("k"), SystemExit(3)])
def test_what_the_function_raises_is_recorded_and_logged_and_the_restart_continues(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    emitted: list[events.Event] = []
    store = IterationStore(Seat(0, 0, 1, 1, 0), CallStore("", dist.HashStore(), emitted.append))
    cause = ValueError()
    for state in (STATE, State(rank=0, world_size=1, store=store)):
        assert ThreadedFinalize(LONG, fail)(state, cause) == (state, cause)
    (event,) = emitted
    assert isinstance(event, events.HookFailed)
    assert event.hook == "finalize"
    assert event.error.startswith(f"{type(error).__name__}: {error} (in test_what_the_function_raises")
    assert [(record.levelname, record.exc_info and record.exc_info[1]) for record in caplog.records] == [
        ("WARNING", error),
        ("WARNING", error),
    ]


def test_unusable_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationTypeError, match="timeout is 5"):
        ThreadedFinalize(5, print)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="timeout is -1 s"):
        ThreadedFinalize(timedelta(seconds=-1), print)
    with pytest.raises(ConfigurationTypeError, match="fn is 'print'"):
        ThreadedFinalize(LONG, "print")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationTypeError, match="timeout is 30"):
        CudaHealthCheck(30)  # type: ignore[arg-type]


# -- CudaHealthCheck ----------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A CUDA in use, with four devices, of which the second is this thread's current one; that of a new one is 0."""
    waited: list[int] = []
    chosen = threading.local()
    chosen.device = 1
    fake = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 4,
        current_device=lambda: getattr(chosen, "device", 0),
        set_device=lambda index: setattr(chosen, "device", index),
        synchronize=waited.append,
        waited=waited,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=fake))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return fake


def test_threaded_finalize_works_on_the_device_of_its_rank(device: SimpleNamespace) -> None:
    devices: list[int] = []
    ThreadedFinalize(LONG, lambda: devices.append(device.current_device()))(STATE, None)
    assert devices == [1]
    device.is_initialized = lambda: False  # then no device is chosen: that would initialise CUDA
    ThreadedFinalize(LONG, lambda: devices.append(device.current_device()))(STATE, None)
    assert devices == [1, 0]


@pytest.mark.parametrize(("local_rank", "waited"), [(None, 1), ("3", 3), ("4", 1)])
def test_device_of_this_rank_is_waited_for_twice(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, local_rank: str | None, waited: int
) -> None:
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    error = ValueError()
    assert CudaHealthCheck()(STATE, error) == (STATE, error)
    assert device.waited == [waited] * 2


def test_device_that_hangs_excludes_the_rank(device: SimpleNamespace, hang: Callable[..., None]) -> None:
    device.synchronize = hang
    with pytest.raises(TimeoutError, match=r"CUDA device 1 of rank 0 did not finish its work within 0.05 s"):
        CudaHealthCheck(SHORT)(STATE, None)


def test_error_that_only_the_second_wait_shows_excludes_the_rank(device: SimpleNamespace) -> None:
    def fail_later(index: int) -> None:
        device.waited.append(index)
        if len(device.waited) == 2:
            raise RuntimeError("device-side assert triggered")

    device.synchronize = fail_later
    with pytest.raises(RuntimeError, match="device-side assert"):
        CudaHealthCheck()(STATE, None)


def test_device_that_is_not_used_is_not_asked(device: SimpleNamespace) -> None:
    device.is_initialized = lambda: False
    CudaHealthCheck()(STATE, None)
    assert device.waited == []


@pytest.mark.gpu
def test_real_device_is_found_and_finishes() -> None:
    import torch

    torch.ones(1000, 1000, device="cuda") @ torch.ones(1000, 1000, device="cuda")
    index = cuda.used_device(None)
    assert index == torch.cuda.current_device()
    assert cuda.finishes_within(60.0, index)


# -- hooks that wait, in real ranks -------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["initialize", "health_check"])
def test_rank_that_waits_in_a_hook_before_the_function_restarts_with_the_others(
    start: Callable[..., Job], hook: str
) -> None:
    job = start(3, "tests.process.keeping:wait_in_a_hook", hook=hook)
    assert [rank.value for rank in job.wait()] == [1, 1, 1]
    assert {record.rank for record in job.interruptions(0)} == {1}
    assert {record.origin.initial_rank for record in job.of(events.HookFailed)} == {1}


def test_rank_that_waits_in_a_collective_of_a_hook_restarts_with_the_others(start: Callable[..., Job]) -> None:
    job = start(3, "tests.process.keeping:wait_natively_in_initialize")
    assert [rank.value for rank in job.wait()] == [1, 1, 1]


@pytest.mark.parametrize(
    "hook",
    [
        "finalize",
        pytest.param("health_check", marks=pytest.mark.slow),
        pytest.param("rank_assignment", marks=pytest.mark.slow),
        pytest.param("rank_filter", marks=pytest.mark.slow),
    ],
)
def test_endless_wait_for_a_lost_rank_in_a_hook_after_a_fault_costs_the_waiting_rank_alone(
    start: Callable[..., Job], hook: str
) -> None:
    job = start(3, "tests.process.keeping:wait_in_a_hook_after_a_fault", hook=hook)
    waiting, lost, healthy = job.wait()
    assert healthy.value is not None
    assert "lost in the hook" in lost.error
    assert waiting.signal is not None
    (silent,) = job.of(events.RankFellSilent)
    assert (silent.origin.initial_rank, silent.event.limit, silent.event.allowed_s) == (0, f"hook:{hook}", 10.0)
    assert {record.origin.initial_rank for record in job.of(events.RankSignalled)} == {0}
