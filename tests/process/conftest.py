"""Fixtures of the tests with real processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from resilience.monitor import starting

EXPORTER_THREADS = {"resilience-exports", "resilience-spans", "resilience-otlp-metrics"}
LIMIT = 30.0  # seconds in which a closed exporter must end


@pytest.fixture(autouse=True)
def killed_monitors_are_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor that a test killed is no zombie afterwards, however long its end takes."""
    monkeypatch.setattr(starting, "KILL_LIMIT", 60.0)


@pytest.fixture(autouse=True)
def exporters_end() -> Iterator[None]:
    """Exporters that a test started in this process have no thread left after it. Such a thread would retry its
    request during later tests, and draw from their random numbers."""
    yield
    for thread in threading.enumerate():
        if thread.name in EXPORTER_THREADS:
            thread.join(LIMIT)
            assert not thread.is_alive(), f"{thread.name} runs after close"
