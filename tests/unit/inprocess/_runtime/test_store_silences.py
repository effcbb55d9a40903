"""For how long the store did not answer, and what that makes of a rank's silence."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from resilience.core.observation import Doing, Observation
from resilience.core.standstills import Standstill
from resilience.errors import StoreError
from resilience.facts.limits import Limit, Limits
from resilience.inprocess._runtime import store_silences
from resilience.inprocess._runtime.store_silences import StoreSilences
from resilience.monitor import calling_rank
from resilience.monitor.calling_rank import CallingRank


class Store:
    """A store that answers when it is let, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(store_silences, "time", clock)
        monkeypatch.setattr(calling_rank, "time", clock)
        self.questions: list[Callable[[], None]] = []
        self.error: Exception | None = None
        self.silences = StoreSilences(self.questions.append, self.ask)
        self.silences.open(60.0)

    def ask(self) -> None:
        if self.error is not None:
            raise self.error

    def answer(self) -> None:
        self.questions.pop()()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(monkeypatch)


def test_store_is_silent_from_a_question_to_its_answer(store: Store) -> None:
    store.silences.ask()
    assert store.silences.all() == []
    store.now += 10.0
    store.silences.ask()  # the first one is open
    assert len(store.questions) == 1
    assert store.silences.all() == [Standstill(100.0, 110.0)]
    store.answer()
    store.now += 5.0
    assert store.silences.all() == [Standstill(100.0, 110.0)]


def test_store_that_answers_at_once_was_not_silent(store: Store) -> None:
    store.silences.ask()
    store.answer()
    assert store.silences.all() == []


def test_silence_of_a_store_counts_up_to_its_limit(store: Store) -> None:
    store.silences.ask()
    store.now += 3600.0
    assert store.silences.all() == [Standstill(100.0, 160.0)]
    store.answer()
    assert store.silences.all() == [Standstill(100.0, 160.0)]


def test_lost_store_is_not_asked_again(store: Store) -> None:
    store.silences.ask()
    store.now += 2.0
    store.error = StoreError("lost")
    with pytest.raises(StoreError):
        store.answer()
    store.silences.ask()
    assert store.questions == []
    assert store.silences.all() == [Standstill(100.0, 102.0)]


def test_store_is_not_asked_before_the_call_has_begun(store: Store) -> None:
    silences = StoreSilences(store.questions.append, store.ask)
    silences.ask()
    store.now += 30.0
    assert (store.questions, silences.all()) == ([], [])


@pytest.mark.parametrize(
    ("observation", "is_asked"),
    [
        (Observation(doing=Doing.FUNCTION, since=10.0, watchdog_at=85.0), True),  # 15 of 60 s
        (Observation(doing=Doing.FUNCTION, since=85.0), True),
        (Observation(doing=Doing.FUNCTION, since=10.0, watchdog_at=86.0), False),
        (Observation(doing=Doing.FUNCTION, since=86.0, watchdog_at=10.0), False),
        (Observation(doing=Doing.FUNCTION, since=10.0, interrupted_at=90.0), False),
        (Observation(doing=Doing.FUNCTION, since=10.0, store_due_at=90.0), False),
        (Observation(doing=Doing.HOOK, since=10.0), False),
        (Observation(doing=Doing.OUTSIDE), False),
    ],
)
def test_store_is_asked_while_its_rank_is_silent_in_the_function(
    store: Store, observation: Observation, is_asked: bool
) -> None:
    subject: Any = CallingRank.__new__(CallingRank)
    subject._silences, subject._asks_at = store.silences, 0.0
    subject.monitor = SimpleNamespace(limits=Limits(watchdog=Limit(60.0, 90.0)))
    assert subject.completed(observation).standstills == ()
    assert bool(store.questions) is is_asked
    store.now += 10.0
    expected = (Standstill(100.0, 110.0),) if is_asked else ()
    assert subject.completed(observation).standstills == expected


def test_silence_of_the_store_is_none_of_a_hook(store: Store) -> None:
    subject: Any = CallingRank.__new__(CallingRank)
    subject._silences = store.silences
    subject.monitor = SimpleNamespace(limits=Limits(watchdog=Limit(60.0, 90.0)))
    subject.completed(Observation(doing=Doing.FUNCTION, since=10.0))
    store.now += 10.0
    assert subject.completed(Observation(doing=Doing.HOOK, since=100.0)).standstills == ()


@pytest.mark.parametrize(
    ("observation", "looks_at"),
    [
        (Observation(doing=Doing.FUNCTION, since=10.0, watchdog_at=95.0), 110.0),
        (Observation(doing=Doing.FUNCTION, since=10.0, watchdog_at=50.0), 115.0),  # it is asked now, and then again
        (Observation(doing=Doing.WAITING, since=10.0), 1000.0),
    ],
)
def test_monitor_looks_in_time_to_ask_the_store(store: Store, observation: Observation, looks_at: float) -> None:
    subject: Any = CallingRank.__new__(CallingRank)
    subject._silences = store.silences
    subject.monitor = SimpleNamespace(limits=Limits(watchdog=Limit(60.0, 90.0)))
    subject.completed(observation)
    assert subject.due(1000.0) == looks_at
