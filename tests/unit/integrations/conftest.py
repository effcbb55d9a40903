"""A monitor that is not there, for callbacks that are."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from resilience.integrations import watching
from tests.unit.integrations.faking import FakeClient


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the monitor of the rank is told."""
    monkeypatch.setenv("RESILIENCE_MONITOR_SOCKET", "/nowhere")
    monkeypatch.delenv("FAULT_TOL_FINISHED_FLAG_FILE", raising=False)
    monkeypatch.setattr(watching, "RankMonitorClient", FakeClient)
    monkeypatch.setattr(watching.Watching, "_begun", None)  # of an earlier test
    monkeypatch.setattr(watching.client, "step", lambda number: FakeClient.told.append(f"step {number}"))
    yield FakeClient.told
    FakeClient.clear()


@pytest.fixture
def stop_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher was asked to stop the job, and the monitor's page shows that."""
    page = SimpleNamespace(is_wanted=lambda: False)
    monkeypatch.setattr(watching.connect, "latest", lambda: SimpleNamespace(page=page))
