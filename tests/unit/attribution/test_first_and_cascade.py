"""Which interruptions does one node count as first?"""

from __future__ import annotations

import pytest

from resilience.attribution.first_and_cascade import Interruptions
from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.interruptions import ExceptionInfo, Interruption, InterruptionRecord
from resilience.facts.records import Record

BAD = ExceptionInfo("ValueError", "bad", "mark")


@pytest.mark.parametrize(("by", "is_own", "place"), [(0, True, "cascade"), (0, False, "first"), (1, True, "first")])
def test_error_is_first_unless_another_nodes_rank_is_known_to_have_failed_before(
    by: int, is_own: bool, place: str
) -> None:
    """Rank 1 is alone on its node; the store has the record of rank `by` first."""
    failed = InterruptionRecord(1, Interruption.EXCEPTION, exception=BAD, origin="own")
    origin = Origin("job", "node1", "rank", 7, iteration=0, initial_rank=1)
    interruptions = Interruptions()
    for event in (
        events.IterationStarted(2, "active"),
        events.Interrupted(failed),
        events.OutcomeSeen(by, is_own=is_own),
    ):
        interruptions.take(Record(0, 5, 5, origin, event))
    ((labels, count),) = interruptions.counted({}).items()
    assert (labels[-1], count) == (place, 1)


@pytest.mark.parametrize(("fault_of", "place"), [(0, "cascade"), (1, "first"), (None, "first")])
def test_death_is_first_unless_the_store_had_the_fault_of_another_nodes_rank_before(
    fault_of: int | None, place: str
) -> None:
    """Rank 1 was alone on its node, so no rank there learned how the iteration was decided."""
    interruptions = Interruptions()
    of_rank = Origin("job", "node1", "rank", 7, iteration=0, initial_rank=1)
    of_monitor = Origin("job", "node1", "monitor", 8, iteration=0, initial_rank=1)
    interruptions.take(Record(0, 5, 5, of_rank, events.IterationStarted(2, "active")))
    for event in (
        events.Interrupted(InterruptionRecord(1, Interruption.TERMINATED, pid=7)),
        events.InterruptionArrived(1, Interruption.TERMINATED, 0, 2, fault_of),
        events.MonitorEnded(0),
    ):
        interruptions.take(Record(0, 6, 6, of_monitor, event))
    ((labels, count),) = interruptions.counted({}).items()
    assert (labels[-1], count) == (place, 1)
