"""Aborts beside that of torch.distributed: what each ends, and that it does nothing where there is nothing to end."""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from resilience.errors import ConfigurationError, ConfigurationTypeError
from resilience.inprocess import Compose
from resilience.inprocess.abort import (
    Abort,
    AbortCheckpointWriters,
    AbortTorchDistributed,
    AbortTransformerEngine,
    abort_wait,
)
from resilience.inprocess.state import State

EXECUTOR = "torch.distributed.checkpoint._async_process_executor"


@pytest.fixture
def state() -> State:
    return State(rank=0, world_size=1)


# -- how long an abort may wait -----------------------------------------------------------------------


@pytest.mark.parametrize(("given", "wait"), [(None, 30.0), (5.0, 5.0), (89.0, 89.0)])
def test_abort_waits_as_long_as_is_left_between_the_timeouts_or_as_it_is_set(given: float | None, wait: float) -> None:
    assert abort_wait(given, soft_timeout=60.0, hard_timeout=90.0) == wait


@pytest.mark.parametrize("given", [90.0, 600.0])
def test_abort_that_would_outlast_hard_timeout_is_refused(given: float) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"RESILIENCE_ABORT_WAIT is {given:g} s, expected less than .*\(90 s\)"
    ):
        abort_wait(given, soft_timeout=60.0, hard_timeout=90.0)


def test_hooks_of_one_abort_share_its_time(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    assert state.abort_time_left() == 30.0  # outside of a Wrapper
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    state.abort_begins(5.0)
    assert state.abort_time_left() == 5.0
    now = 103.0
    assert state.abort_time_left() == 2.0
    now = 200.0
    assert state.abort_time_left() == 0.0


# -- TransformerEngine --------------------------------------------------------------------------------


def test_userbuffers_of_transformer_engine_are_given_up(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed: list[int] = []
    base: Any = ModuleType("transformer_engine.pytorch.module.base")
    base.destroy_ub = lambda: destroyed.append(1)
    monkeypatch.setitem(sys.modules, base.__name__, base)
    assert AbortTransformerEngine()(state) is state
    assert destroyed == [1]


def test_transformer_engine_is_not_imported_for_its_abort(state: State) -> None:
    assert AbortTransformerEngine()(state) is state
    assert not any(name.startswith("transformer_engine") for name in sys.modules)


# -- checkpoint writers -------------------------------------------------------------------------------


def test_background_process_of_async_save_is_ended_and_forgotten(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    process = SimpleNamespace(
        terminate=lambda: done.append("terminate"),
        join=lambda limit: done.append("join"),
        is_alive=lambda: "kill" not in done,
        kill=lambda: done.append("kill"),
    )
    executor: Any = ModuleType(EXECUTOR)
    executor._CHECKPOINT_PROCESS = SimpleNamespace(_save_process=process)
    monkeypatch.setitem(sys.modules, EXECUTOR, executor)
    assert AbortCheckpointWriters()(state) is state
    assert done == ["terminate", "join", "kill", "join"]
    assert executor._CHECKPOINT_PROCESS is None
    assert AbortCheckpointWriters()(state) is state  # nothing is left to end
    assert len(done) == 4


def test_writer_of_the_users_own_is_stopped(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, EXECUTOR, raising=False)
    stopped: list[int] = []
    assert AbortCheckpointWriters(stop=lambda: stopped.append(1))(state) is state
    assert stopped == [1]
    with pytest.raises(ConfigurationTypeError, match="stop is 5, expected a function"):
        AbortCheckpointWriters(stop=5)  # type: ignore[arg-type]


# -- together -----------------------------------------------------------------------------------------


def test_aborts_are_composed_like_other_hooks(state: State) -> None:
    order: list[str] = []

    class Note(Abort):
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, state: State) -> State:
            order.append(self.name)
            return state

    first, last = Note("first"), Note("last")
    composed = Compose(last, AbortCheckpointWriters(), AbortTransformerEngine(), AbortTorchDistributed(), first)
    assert isinstance(composed, Abort)
    assert composed(state) is state
    assert order == ["first", "last"]


def test_abort_that_is_combined_with_another_class_calls_its_constructor() -> None:
    class Mixin:
        def __init__(self) -> None:
            self.is_ready = True

    class Combined(AbortTorchDistributed, Mixin):
        pass

    assert Combined().is_ready
