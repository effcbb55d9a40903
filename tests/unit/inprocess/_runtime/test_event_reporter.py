"""What a rank reports about its restarts: when it made progress again, and with which step it continued."""

from __future__ import annotations

from typing import cast

import pytest

from resilience.facts import events
from resilience.inprocess._runtime.event_reporter import RankEvents, Sign
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
    page, emitted = RankSide(Page.create()), Emitted()
    reporter = RankEvents(cast(Emitter, emitted), lambda: page.step_value)
    reporter.interrupted(0.0)
    reporter.entering()

    def progressed(sign: str) -> None:
        if not reporter.progressed(cast(Sign, sign)):
            page.on_progress = None

    page.on_progress = progressed
    emitted.events.clear()
    return page, emitted


@pytest.mark.parametrize("first", ["section", "heartbeat", "ping"])
def test_first_step_after_another_sign_of_progress_is_reported_once(first: str) -> None:
    page, emitted = after_restart()
    signs = {"section": lambda: page.enter("load checkpoint"), "heartbeat": page.heartbeat, "ping": page.ping}
    signs[first]()
    page.heartbeat()
    page.step(50)
    page.step(51)
    ends = [event for event in emitted.events if isinstance(event, events.RestartEnded | events.FirstStepTaken)]
    (ended, stepped) = ends
    assert isinstance(ended, events.RestartEnded) and (ended.sign, ended.step) == (first, None)
    assert stepped == events.FirstStepTaken(50)
    assert page.on_progress is None  # further steps cost nothing


def test_step_that_ends_a_restart_is_reported_with_it() -> None:
    page, emitted = after_restart()
    page.step(50)
    assert page.on_progress is None
    (ended,) = [event for event in emitted.events if isinstance(event, events.RestartEnded)]
    assert (ended.sign, ended.step) == ("step", 50)
    assert not any(isinstance(event, events.FirstStepTaken) for event in emitted.events)
