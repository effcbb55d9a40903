"""Every span that is not sent is counted once, also at the end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from resilience.facts import events
from resilience.system.environment import Exporting
from resilience.telemetry import otlp
from resilience.telemetry.otlp import SpanSender
from resilience.telemetry.span import Span


class Stalled:
    """An exporter whose collector does not answer until the end of the test."""

    def __init__(self, result: str) -> None:
        self.is_asked = threading.Event()
        self.answers = threading.Event()
        self._result = result

    def export(self, spans: Sequence[Any]) -> Any:
        self.is_asked.set()
        self.answers.wait()
        return SimpleNamespace(name=self._result)

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize("result", ["SUCCESS", "FAILURE"])
def test_spans_of_a_request_that_outlives_the_end_are_counted_once(
    result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = Stalled(result)
    monkeypatch.setattr(otlp, "_load", lambda *_: (exporter, lambda span: span))
    emitted: list[events.Event] = []
    sender = SpanSender(Exporting(protocol="grpc", batch=3), "node", emitted.append)
    for _ in range(5):
        sender.offer(Span("restart", 1, 2, None, 0, 1, {}))
    assert exporter.is_asked.wait(60.0)
    sender.close(0.0)
    exporter.answers.set()
    sender._thread.join(60.0)
    sender._report_losses()
    dropped = [event for event in emitted if isinstance(event, events.TelemetryDropped)]
    assert dropped == [events.TelemetryDropped("span", "closing", 5)]


def test_spans_that_an_exporters_release_does_not_take_are_counted_and_the_next_ones_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def convert(span: Span) -> Any:
        raise TypeError("unexpected keyword argument")

    exporter = Stalled("SUCCESS")
    monkeypatch.setattr(otlp, "_load", lambda *_: (exporter, convert))
    emitted: list[events.Event] = []
    sender = SpanSender(Exporting(protocol="grpc", batch=1), "node", emitted.append)
    for _ in range(2):
        sender.offer(Span("restart", 1, 2, None, 0, 1, {}))
    sender.close(60.0)
    assert sum(event.count for event in emitted if isinstance(event, events.TelemetryDropped)) == 2
    assert [event.exporter for event in emitted if isinstance(event, events.ExportFailed)] == ["otlp"]
    assert not exporter.is_asked.is_set()
