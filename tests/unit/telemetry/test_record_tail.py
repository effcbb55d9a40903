"""What does a reader of a record file leave out?"""

from __future__ import annotations

from pathlib import Path

from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.records import Record, beginnings, to_line
from resilience.telemetry.recording import RecordTail

ORIGIN = Origin("job", 'a"event":{b', "rank", 7, iteration=0, initial_rank=1)
TOLD = (
    events.StageStarted("run"),
    events.IterationStarted(1, "active"),
    events.RestartEnded("exception", 0.5, "entry"),
    events.StageStarted("restart"),
)


def test_lines_of_unwanted_kinds_are_left_out_but_for_the_last_one_of_a_look(tmp_path: Path) -> None:
    path = tmp_path / "node-1.jsonl"
    path.write_bytes(b"".join(to_line(Record(n, n, n, ORIGIN, event)) for n, event in enumerate(TOLD)))
    tail = RecordTail(path, without=beginnings(events.StageStarted, events.RestartEnded))
    assert [record.event for record in tail.added()] == [TOLD[1], TOLD[3]]
    assert tail.added(path.stat().st_size) == []
