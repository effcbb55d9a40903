"""Records in memory, and asking for one."""

from __future__ import annotations

import pytest

from resilience.facts.events import RankFellSilent, RankLeft
from resilience.facts.identity import Origin
from resilience.telemetry.emitter import Emitter
from resilience.testing.records import Recorded


def silent(limit: str) -> RankFellSilent:
    return RankFellSilent(limit=limit, severity="soft", allowed_s=1.0, silent_for_s=2.0)


def test_records_are_found_by_fields_of_event_and_origin() -> None:
    sink = Recorded()
    emitter = Emitter(Origin(job_id="j", node="n", role="rank", pid=1, initial_rank=3), [sink])
    emitter.emit(silent("step"), RankLeft("ValueError"), silent("ping"))
    assert [record.sequence for record in sink.of(RankFellSilent)] == [0, 2]
    assert sink.only(RankFellSilent, limit="ping", initial_rank=3).sequence == 2
    assert sink.of(RankFellSilent, initial_rank=4) == []
    with pytest.raises(AssertionError, match="2 records of RankFellSilent"):
        sink.only(RankFellSilent)
