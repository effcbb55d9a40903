"""The emitter numbers, stamps and hands out; what a sink does not take is counted and told."""

from __future__ import annotations

from resilience.facts.events import AbortFailed, StageStarted, TelemetryDropped
from resilience.facts.identity import Origin
from resilience.facts.records import Record
from resilience.telemetry.emitter import Emitter

ORIGIN = Origin("job", "node", "rank", 1, initial_rank=0)


class Sink:
    """Takes records while it is open."""

    def __init__(self) -> None:
        self.taken: list[Record] = []
        self.is_open = True
        self.error: Exception | None = None

    def take(self, record: Record) -> bool:
        if self.error is not None:
            raise self.error
        if self.is_open:
            self.taken.append(record)
        return self.is_open


def test_records_are_numbered_and_stamped_in_order() -> None:
    sink = Sink()
    emitter = Emitter(ORIGIN, [sink])
    emitter.emit(StageStarted("run"), AbortFailed("x"))
    emitter.move(iteration=3, rank=1)
    emitter.emit(StageStarted("run"))
    assert [record.sequence for record in sink.taken] == [0, 1, 2]
    assert [record.origin.iteration for record in sink.taken] == [None, None, 3]
    assert sink.taken[0].mono_ns <= sink.taken[1].mono_ns


def test_lost_records_are_reported_with_the_next_that_goes_through() -> None:
    sink = Sink()
    emitter = Emitter(ORIGIN, [sink])
    sink.is_open = False
    emitter.emit(StageStarted("run"), StageStarted("abort"))
    sink.is_open = True
    emitter.emit(StageStarted("check"))
    told, last = sink.taken
    assert told.event == TelemetryDropped("record", "sink", 2)
    assert last.event == StageStarted("check")


def test_sink_that_raises_loses_the_record_and_nothing_else() -> None:
    broken, whole = Sink(), Sink()
    broken.error = RuntimeError("no space left on device")
    emitter = Emitter(ORIGIN, [broken, whole])
    emitter.emit(StageStarted("run"))
    assert [record.event for record in whole.taken] == [StageStarted("run")]
    broken.error = None
    emitter.emit(StageStarted("check"))
    assert [record.event for record in broken.taken] == [TelemetryDropped("record", "sink", 1), StageStarted("check")]
