"""What a rank's monitor does while its host fails."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from resilience.monitor.server import RankMonitor


def test_monitor_without_a_thread_for_the_mutex_keeps_the_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monitor: Any = RankMonitor.__new__(RankMonitor)
    monitor._page = None
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monitor._watch_mutex()
    assert monitor._death is None
