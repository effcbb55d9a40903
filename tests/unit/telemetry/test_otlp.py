"""Every span that is not sent is counted once, also at the end."""

from __future__ import annotations

import logging
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


@pytest.mark.parametrize(
    ("convert_error", "export_error", "reason"),
    [
        (
            None,
            OSError(111, "Connection refused"),
            "http://c:4318 does not take spans: ConnectionRefusedError: [Errno 111]",
        ),
        (TypeError("no such field"), None, "spans cannot be converted: TypeError: no such field"),
    ],
)
def test_report_of_lost_spans_tells_their_conversion_from_the_collector(
    convert_error: Exception | None, export_error: Exception | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(error: Exception | None) -> Any:
        if error is not None:
            raise error

    exporter = SimpleNamespace(export=lambda spans: fail(export_error), shutdown=lambda: None)
    monkeypatch.setattr(otlp, "_load", lambda *_: (exporter, lambda span: fail(convert_error)))
    emitted: list[events.Event] = []
    sender = SpanSender(Exporting(endpoint="http://c:4318", batch=1), "node", emitted.append)
    sender.offer(Span("restart", 1, 2, None, 0, 1, {}))
    sender.close(60.0)
    (failed,) = [event for event in emitted if isinstance(event, events.ExportFailed)]
    assert failed.reason.startswith(reason)


def test_report_of_spans_that_are_not_sent_has_the_words_of_the_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises nothing, and its result says nothing."""

    def export(spans: Sequence[Any]) -> Any:
        for message in ("Unsupported type", "Transient error: connection refused", "Gave up"):
            logging.getLogger("opentelemetry.exporter.otlp").warning(message)
        return SimpleNamespace(name="FAILURE")

    monkeypatch.setattr(otlp, "_load", lambda *_: (SimpleNamespace(export=export, shutdown=lambda: None), str))
    emitted: list[events.Event] = []
    sender = SpanSender(Exporting(endpoint="http://c:4318", batch=1), "node", emitted.append)
    sender.offer(Span("restart", 1, 2, None, 0, 1, {}))
    sender.close(60.0)
    (failed,) = [event for event in emitted if isinstance(event, events.ExportFailed)]
    assert failed.reason == "http://c:4318 does not take spans: Transient error: connection refused; Gave up"
