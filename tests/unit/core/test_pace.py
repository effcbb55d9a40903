"""A monitor reads records together and at once whatever may mean more. The clock is virtual."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from resilience.core.pace import EVERY, Pace

NEVER = float("inf")


class Monitor:
    """Follows its pace, as `RankMonitor.run` does, at the moments it is woken."""

    def __init__(self, due: float = NEVER) -> None:
        self.pace, self.now, self.due = Pace(), 0.0, due
        self.queue: list[tuple[float, bool]] = []  # what the rank has said and nobody has read: when, is it a request
        self.woken: Counter[str] = Counter()
        self.read: list[tuple[float, float]] = []  # said, read
        self.looked: list[float] = []

    def until(self, end: float, says: list[tuple[float, bool]], events: list[float]) -> None:
        """Go on until a moment. says: what the rank will say; events: when something else happens."""
        while True:
            at = self.pace.wake_at(self.now, self.due)
            if self.pace.reads(self.now):
                at = min([at, *(max(self.now, when) for when, _ in self.queue), *(when for when, _ in says)])
            at = min([at, *events])
            if at > end:
                return
            reads = self.pace.reads(self.now)  # as the line was, or was not, waited for
            self.now = max(self.now, at)
            self.woken["times"] += 1
            while says and says[0][0] <= self.now:
                self.queue.append(says.pop(0))
            if reads and self.queue:
                self.pace = self.pace.heard()
                for when, is_request in self.queue:
                    self.read.append((when, self.now))
                    self.pace = self.pace.asked() if is_request else self.pace.recorded(self.now)
                self.queue.clear()
            while events and events[0] <= self.now:
                self.pace = self.pace.asked()
                events.pop(0)
            if self.pace.looks(self.now, self.due):
                self.pace = self.pace.looked(self.now)
                self.looked.append(self.now)
                self.due = NEVER if self.now >= self.due else self.due


def test_many_records_are_read_together() -> None:
    monitor = Monitor()
    monitor.until(1.0, [(0.1 + n / 1000, False) for n in range(50)], [])
    assert len(monitor.read) == 50
    assert monitor.woken["times"] <= 2 * (1 + 0.05 / EVERY)


@pytest.mark.parametrize("seed", range(200))
def test_no_record_waits_longer_than_promised_and_nothing_else_waits(seed: int) -> None:
    random = Random(seed)
    says = sorted((random.random() * 0.2, random.random() < 0.1) for _ in range(random.randint(1, 80)))
    events = sorted(random.random() * 0.2 for _ in range(random.randint(0, 4)))
    due = random.choice([NEVER, random.random() * 0.2])
    monitor = Monitor(due)
    monitor.until(1.0, list(says), list(events))
    assert len(monitor.read) == len(says)  # each one
    assert all(-1e-9 <= read - said <= EVERY + 1e-9 for said, read in monitor.read)
    assert monitor.looked[-1] >= monitor.read[-1][1]  # the last news is looked at
    for event in events:
        assert any(abs(at - event) < 1e-9 for at in monitor.looked)
    if due is not NEVER:
        assert any(abs(at - due) < 1e-9 for at in monitor.looked)


def test_request_ends_the_rest() -> None:
    resting = Pace().recorded(5.0)
    assert not resting.reads(5.0 + EVERY / 2)
    assert resting.asked().reads(5.0 + EVERY / 2)
    assert resting.asked().looks(5.0, NEVER)
