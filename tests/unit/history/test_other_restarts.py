"""Which restarts by a launcher like torchrun have an interval."""

from __future__ import annotations

from typing import Literal

import pytest

from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.records import Record
from resilience.history.other_restarts import OtherRestarts


def record(at_s: int, event: events.Event, cycle: int, iteration: int = 0) -> Record:
    origin = Origin("job", "node", "rank", 100 + cycle, cycle=cycle, initial_rank=1, iteration=iteration)
    return Record(at_s, 10**18 + at_s * 10**9, at_s * 10**9, origin, event)


@pytest.mark.parametrize(("state", "intervals"), [("active", [(0, 11.0)]), ("inactive", [])])
def test_rank_that_came_back_as_a_spare_has_no_restart_when_it_becomes_active_later(
    state: Literal["active", "inactive"], intervals: list[tuple[int, float]]
) -> None:
    called = events.CallStarted("train", 2, "1", "2", "3", "h", "forked", restarts_left=2)
    records = [
        record(0, called, 0),
        record(1, events.IterationStarted(2, "active"), 0),
        record(2, events.StageStarted("run"), 0),
        record(100, events.RankExited(False, 1), 0),
        record(110, called, 1),
        record(110, events.IterationStarted(1, state), 1),
        *([record(111, events.StageStarted("run"), 1)] if state == "active" else []),
        record(9000, events.IterationStarted(2, "active"), 1, iteration=1),
        record(9001, events.StageStarted("run"), 1, iteration=1),
    ]
    restarts = OtherRestarts()
    found = [interval for one in records for interval in restarts.take(one)]
    assert [(interval.origin.cycle, interval.seconds) for interval in found] == intervals
