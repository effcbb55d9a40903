"""What a rank reports about its restarts: when it made progress again, and with which step it continued."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import pytest

from resilience.facts import events
from resilience.inprocess._runtime.event_reporter import RankEvents
from resilience.inprocess.state import State
from resilience.monitor.page import Page, RankSide
from resilience.telemetry.emitter import Emitter


class Emitted:
    """Keeps what is emitted."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []

    def emit(self, *emitted: events.Event) -> None:
        self.events += emitted


def after_restart() -> tuple[RankSide, Emitted]:
    """A rank that has entered its function again after an interruption, as the call connects page and reporter."""
    page, _, emitted = entered_again(lambda page: page.heartbeat())
    emitted.events.clear()
    return page, emitted


def entered_again(first: Callable[[RankSide], object]) -> tuple[RankSide, RankEvents, Emitted]:
    """A rank that has entered its function again after an interruption. first: what the function did before."""
    page, emitted = RankSide(Page.create()), Emitted()
    reporter = RankEvents(cast(Emitter, emitted), lambda: page.step_value)

    def progressed(sign: str) -> None:
        if not reporter.progressed(cast(events.ProgressSign, sign)):
            page.on_progress = None

    reporter.entering()
    page.on_progress = progressed
    first(page)
    reporter.left_function(is_interrupted=True, failed=False)
    reporter.interrupted(0.0)
    emitted.events.clear()
    reporter.entering()
    page.on_progress = progressed
    return page, reporter, emitted


def ends(emitted: Emitted) -> list[events.Event]:
    return [event for event in emitted.events if isinstance(event, events.RestartEnded | events.RestartStep)]


@pytest.mark.parametrize("first", ["section", "heartbeat", "ping"])
def test_first_step_after_another_sign_of_progress_is_reported_once(first: str) -> None:
    page, emitted = after_restart()
    signs = {"section": lambda: page.enter("load checkpoint"), "heartbeat": page.heartbeat, "ping": page.ping}
    signs[first]()
    page.heartbeat()
    page.step(50)
    page.step(51)
    (ended, stepped) = ends(emitted)
    assert isinstance(ended, events.RestartEnded) and (ended.sign, ended.step) == (first, None)
    assert stepped == events.RestartStep(50)
    assert page.on_progress is None  # further steps cost nothing


def test_step_that_ends_a_restart_is_reported_with_it() -> None:
    page, emitted = after_restart()
    page.step(50)
    assert page.on_progress is None
    (ended,) = [event for event in emitted.events if isinstance(event, events.RestartEnded)]
    assert (ended.sign, ended.step) == ("step", 50)
    assert not any(isinstance(event, events.RestartStep) for event in emitted.events)


def first_steps(emitted: Emitted) -> list[events.Event]:
    return [event for event in emitted.events if isinstance(event, events.FirstStepReported | events.RestartStep)]


def test_first_step_of_a_call_is_reported_with_the_time_since_the_function_was_entered() -> None:
    page, emitted = RankSide(Page.create()), Emitted()
    reporter = RankEvents(cast(Emitter, emitted), lambda: page.step_value)
    reporter.entering()
    page.on_progress = lambda sign: None if reporter.progressed(cast(events.ProgressSign, sign)) else clear(page)
    page.enter("load checkpoint")
    time.sleep(0.02)
    page.step(100)
    assert page.on_progress is None  # further steps cost nothing
    page.step(101)
    (first,) = first_steps(emitted)
    assert isinstance(first, events.FirstStepReported)
    assert first.step == 100
    assert 0.02 <= first.after_s < 60


def clear(page: RankSide) -> None:
    page.on_progress = None


def test_iteration_after_a_restart_reports_no_first_step_of_a_call() -> None:
    page, emitted = after_restart()
    page.step(50)
    page.step(51)
    assert first_steps(emitted) == []  # `restart.ended` has the step


def test_restart_of_a_function_that_never_shows_progress_ends_with_its_entry() -> None:
    page, reporter, emitted = entered_again(lambda page: None)
    (ended,) = ends(emitted)
    assert isinstance(ended, events.RestartEnded) and ended.sign == "entry"
    page.step(50)
    reporter.left_function(is_interrupted=False, failed=False)
    assert ends(emitted) == [ended, events.RestartStep(50)]


def test_restart_of_a_function_that_had_shown_progress_lasts_until_it_does_again_or_is_left() -> None:
    _, reporter, emitted = entered_again(lambda page: page.heartbeat())
    assert ends(emitted) == []
    reporter.left_function(is_interrupted=True, failed=False)
    (ended,) = ends(emitted)
    assert isinstance(ended, events.RestartEnded) and ended.sign == "entry"


def test_each_iteration_is_without_progress_until_the_function_signals_some() -> None:
    """Hooks before the function belong to the iteration."""
    state = State(rank=0, world_size=1)
    page, reporter, _ = entered_again(lambda page: page.heartbeat())
    reporter.iteration_started(state)
    reporter.entering()
    assert reporter.is_without_progress
    page.ping()
    assert not reporter.is_without_progress
    reporter.left_function(is_interrupted=True, failed=False)
    reporter.iteration_started(state)
    assert reporter.is_without_progress
    reporter.entering()
    assert reporter.is_without_progress
