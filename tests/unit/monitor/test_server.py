"""What a rank's monitor does while its host fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from resilience.core.silences import Rule
from resilience.core.watch import Doing, Limit, Limits, Watch, exceeded
from resilience.monitor import page
from resilience.monitor.page import MonitorSide, Page, PageView, RankSide
from resilience.monitor.server import RankMonitor


def test_monitor_without_a_thread_for_the_mutex_keeps_the_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monitor: Any = RankMonitor.__new__(RankMonitor)
    monitor._page = None
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monitor._watch_mutex()
    assert monitor._death is None


class Clock:
    """The clock of a rank that stores into its page."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic_ns(self) -> int:
        self.now += 0.001
        return int(self.now * 1e9)


class Side(MonitorSide):
    """The monitor's side of a page. The rank does something before a given read."""

    reads = 0
    at_read = -1

    def __init__(self, shared: Page, rank: RankSide) -> None:
        super().__init__(shared)
        self.rank = rank

    def read(self) -> PageView:
        self.reads += 1
        if self.reads == self.at_read:
            self.rank.leave("checkpoint")
        return super().read()


@pytest.fixture
def pipe() -> Iterator[int]:
    read_end, write_end = os.pipe()
    yield read_end
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("at_read", [1, 2, 3, 4])
def test_section_without_a_limit_may_end_at_any_moment_of_a_look(
    monkeypatch: pytest.MonkeyPatch, pipe: int, at_read: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(page, "time", clock)
    shared = Page.create()
    rank = RankSide(shared)
    side = Side(shared, rank)
    monitor = RankMonitor(side, None, msgspec.defstruct("Rank", [("pidfd", int)])(pipe), Any, None)  # type: ignore[arg-type]
    monitor._watch = Watch(limits=Limits(rule=Rule(), sections={"checkpoint": Limit()}))

    def look() -> None:
        view = monitor._fold_timings(clock.now)
        monitor._observation = monitor._observe(view)
        assert exceeded(monitor._watch.limits, monitor._observation, clock.now) == []

    rank.doing(Doing.FUNCTION)
    for step in range(20):
        clock.now += 1.0
        rank.step(step)
        look()
    rank.enter("checkpoint")
    for _ in range(100):
        clock.now += 10.0
        look()
    side.reads, side.at_read = 0, at_read
    for _ in range(2):
        look()
