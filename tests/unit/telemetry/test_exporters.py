"""What the exporters of a node do while its host or its disk fails."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from resilience.core import events
from resilience.telemetry.exporters import ExportThread, NodeExports


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "RESILIENCE_MONITOR_SOCKET", "TRACEPARENT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("PORT", "HOST", "TEXTFILE", "RANKS"):
        monkeypatch.delenv(f"RESILIENCE_METRICS_{name}", raising=False)


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("kind", [ExportThread, NodeExports])
def test_host_without_a_thread_exports_nothing_and_says_so(
    kind: type[ExportThread] | type[NodeExports], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    emitted: list[events.Event] = []
    assert kind.start(tmp_path / "run", "node", emitted.append) is None
    assert emitted
    for event in emitted:
        assert isinstance(event, events.ExportFailed) and event.is_at_start
        assert event.reason == "cannot start: RuntimeError: can't start new thread"
