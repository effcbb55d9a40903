"""The clock tells both times of this host, each in its own unit."""

from __future__ import annotations

import time

import pytest

from resilience.system.clock import Clock, SystemClock


def test_each_time_is_its_own_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 12.5)
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_123_456_789)
    clock: Clock = SystemClock()
    assert (clock.monotonic(), clock.wall_ns()) == (12.5, 1_700_000_000_123_456_789)
