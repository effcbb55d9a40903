"""What the watcher reports of the process groups that an interruption aborts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch.distributed as dist

from resilience.core.restart import COMPLETED, Keys, Read
from resilience.errors import BarrierOverflow, StoreError
from resilience.facts.events import AbortFailed, AbortGroup, AnyEvent, InterruptDelivered, IterationDecided
from resilience.facts.interruptions import Collective, Interruption, InterruptionRecord, encode
from resilience.facts.seats import Seat
from resilience.inprocess._runtime import watcher
from resilience.inprocess._runtime.watcher import NVLS_NOTE, IterationWatcher
from resilience.inprocess.exception import RestartAbort
from resilience.inprocess.state import State, Status
from resilience.system import group_aborts
from resilience.system.patience import Patience
from resilience.system.store import execute

LIMIT = 60.0  # seconds


@pytest.mark.parametrize(
    ("backend", "nvls", "note"),
    [
        ("nccl", None, NVLS_NOTE),
        ("nccl", "1", NVLS_NOTE),
        ("cpu:gloo,cuda:nccl", None, NVLS_NOTE),
        ("nccl", "0", ""),
        ("asynchronous", None, ""),
    ],
)
def test_abort_of_an_nccl_group_notes_nvlink_sharp_unless_it_is_switched_off(
    backend: str, nvls: str | None, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    if nvls is not None:
        monkeypatch.setenv("NCCL_NVLS_ENABLE", nvls)
    (event,) = [event for event in events_of_an_interruption(backend, monkeypatch) if isinstance(event, AbortGroup)]
    assert (event.group, event.outcome, event.note) == ("0", "aborted", note)


def test_iteration_may_take_longer_than_one_wait_for_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    at, store, emitted = Keys(0), dist.HashStore(), list[AnyEvent]()
    waits: list[str] = []

    def wait(_: object, key: str, *limits: float) -> bool:
        waits.append(key)
        if len(waits) == 3:
            store.set(key, COMPLETED)
        return len(waits) == 3

    monkeypatch.setattr(watcher, "wait", wait)
    watching = watcher_of(store, at, None, emitted)
    watching.start()
    assert watching.join(LIMIT)
    assert (watching.outcome, watching.is_interrupted, waits, emitted) == (COMPLETED, False, [at.outcome] * 3, [])


def test_outcome_that_the_store_has_lost_is_no_interruption_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "wait", lambda *_: True)
    watching = watcher_of(dist.HashStore(), Keys(0), None, [])
    watching.left()
    watching.start()
    assert watching.join(LIMIT)
    assert (watching.outcome, type(watching.error)) == (watcher.LOST, StoreError)


@pytest.mark.parametrize("error", [SystemExit(3), RestartAbort("over"), RuntimeError("can't start new thread")])
def test_main_thread_is_interrupted_whatever_the_abort_raises(error: BaseException) -> None:
    at, store, emitted = Keys(0), dist.HashStore(), list[AnyEvent]()
    store.set(at.outcome, "interrupted")
    watching = watcher_of(store, at, mock.Mock(side_effect=error), emitted)
    interrupter = watching._interrupter
    interrupter.is_armed = True  # type: ignore[misc]
    interrupter.deliver.side_effect = watching.left  # type: ignore[attr-defined]
    watching.start()
    assert watching.join(LIMIT)
    assert [event.error for event in emitted if isinstance(event, AbortFailed)] == [f"{type(error).__name__}: {error}"]
    assert [event.signals for event in emitted if isinstance(event, InterruptDelivered)] == [1]


@pytest.mark.parametrize("error", [BarrierOverflow("rank 5 of 1"), RuntimeError("no memory")])
def test_main_thread_is_interrupted_whatever_the_report_of_the_outcome_raises(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, store, emitted = Keys(0), dist.HashStore(), list[AnyEvent]()
    store.set(at.outcome, "interrupted")
    store.set(f"{at.records}/1", encode(InterruptionRecord(0, Interruption.SOFT_TIMEOUT)))
    monkeypatch.setattr(watcher, "drive", mock.Mock(side_effect=error))
    watching = watcher_of(store, at, None, emitted)
    interrupter = watching._interrupter
    interrupter.is_armed = True  # type: ignore[misc]
    interrupter.deliver.side_effect = watching.left  # type: ignore[attr-defined]
    watching.start()
    assert watching.join(LIMIT)
    assert [event.signals for event in emitted if isinstance(event, InterruptDelivered)] == [1]


def test_rank_is_a_witness_of_a_hang_at_its_seat_whatever_user_code_made_of_its_state() -> None:
    at, store = Keys(0), dist.HashStore()
    store.set(at.outcome, "interrupted")
    store.set(f"{at.records}/1", encode(InterruptionRecord(0, Interruption.SOFT_TIMEOUT)))
    watching = watcher_of(store, at, None, [])
    watching._state = lambda: State(rank=5, world_size=1)
    watching.left()
    watching.start()
    assert watching.join(LIMIT)
    assert execute(Read((f"{at.witnessed}/done",)), store) != (None,)


def test_abort_hook_gets_the_present_state_and_sees_that_it_aborts() -> None:
    at, store, seen = Keys(0), dist.HashStore(), list[tuple[int, Status]]()
    store.set(at.outcome, "interrupted")
    watching = watcher_of(store, at, lambda state: seen.append((state.rank, state.status)), [])
    replaced = State(rank=1, world_size=2)  # by the initialize hook, after the watcher began
    watching._state = lambda: replaced
    watching.left()
    watching.start()
    assert watching.join(LIMIT)
    assert seen == [(1, Status.ABORTING)]
    assert watching.freed_after_s < LIMIT


def test_watcher_that_an_exception_kept_from_starting_ends() -> None:
    watching = watcher_of(dist.HashStore(), Keys(0), None, [])
    watching.end()  # raises nothing in place of that exception
    assert watching.join(0.0)


def test_position_at_the_decision_is_on_record_whatever_the_abort_ends() -> None:
    """Its monitor may read the page much later."""
    at, store, emitted = Keys(0), dist.HashStore(), list[AnyEvent]()
    store.set(at.outcome, "interrupted")
    entered = Collective(5, 3, "barrier", left=False)
    position = (7, ("evaluate",), (entered,))

    def abort(state: State) -> None:
        nonlocal position
        position = (7, (), (msgspec.structs.replace(entered, left=True),))

    watching = watcher_of(store, at, abort, emitted, lambda: position)
    watching.left()
    watching.start()
    assert watching.join(LIMIT)
    (decided,) = (event for event in emitted if isinstance(event, IterationDecided))
    assert (decided.step, decided.sections, decided.collectives) == (7, ("evaluate",), (entered,))


def test_abort_without_a_thread_for_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.Thread.start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
    abort = group_aborts._Abort(mock.Mock(), "0", "nccl")
    abort.wait(LIMIT)
    assert abort.done == group_aborts.GroupAbort("0", "nccl", 0.0, "failed", "RuntimeError: can't start new thread")


def events_of_an_interruption(backend: str, monkeypatch: pytest.MonkeyPatch) -> list[AnyEvent]:
    """Return what the watcher of an interrupted iteration emits that has one accelerator group of this backend."""
    group = mock.Mock()
    world = SimpleNamespace(pg_map={group: (backend, None)}, pg_names={group: "0"}, pg_backend_config={group: backend})
    monkeypatch.setattr(group_aborts, "c10d", lambda: SimpleNamespace(_world=world))
    at, store, emitted = Keys(0), dist.HashStore(), list[AnyEvent]()
    store.set(at.outcome, "interrupted")

    def abort(state: State) -> None:
        group_aborts.abort_all(LIMIT)

    watching = watcher_of(store, at, abort, emitted)
    watching.left()  # the main thread needs no interruption
    watching.start()
    try:
        assert watching.join(LIMIT)
    finally:
        group_aborts.forget()
    return emitted


def watcher_of(
    store: dist.Store,
    at: Keys,
    abort: Any,
    emitted: list[AnyEvent],
    position: Callable[[], Any] = lambda: (None, (), ()),
) -> IterationWatcher:
    """Return the watcher of one rank's iteration."""
    state = State(rank=0, world_size=1)
    return IterationWatcher(
        store,
        Seat(0, state.rank, state.world_size, state.world_size, at.iteration),
        lambda: state,
        abort,
        mock.MagicMock(),
        position,
        emitted.append,
        patience=Patience(store, (), LIMIT, 1.0),
        abort_wait=LIMIT,
        abort_limit=LIMIT,
    )
