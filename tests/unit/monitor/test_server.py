"""What a rank's monitor does while its host fails."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from selectors import DefaultSelector
from typing import Any

import msgspec
import pytest

from resilience.adapters.channel import pair
from resilience.adapters.processes import Process
from resilience.core.identity import Origin
from resilience.core.silences import Rule
from resilience.core.watch import Doing, Limit, Limits, Watch, exceeded
from resilience.monitor import messages, page
from resilience.monitor.page import MonitorSide, Page, PageView, RankSide
from resilience.monitor.server import RankMonitor
from resilience.monitor.worker import WorkerMonitor


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


def test_each_program_of_a_worker_has_a_warm_up_of_its_own(tmp_path: Path) -> None:
    pid = os.getpid()
    origin = Origin("job", "n", "rank", pid, initial_rank=0, rank=0, world_size=1)
    assigned = messages.Assigned(pid, 0, origin, bytes(tmp_path), Limits())
    monitor = WorkerMonitor(assigned, Process(pid), DefaultSelector(), lambda message, fds: None)
    channels = []
    counts = []
    for _ in range(2):
        ours, theirs = pair()
        channels.append(ours)
        shared, dump = Page.create(), os.memfd_create("dump")
        monitor.attach(messages.Attachment(pid, is_locked=False), shared, theirs, dump, is_new=True)
        rank = RankSide(shared)
        for _ in range(3):
            rank.enter("load")
            rank.leave("load")
        counts.append(monitor._ended("load"))
        monitor._fold_timings(time.monotonic())
        counts.append(monitor._ended("load"))
    monitor._release()
    for channel in channels:
        channel.close()
    assert counts == [0, 3, 0, 3]
