"""What a record file loses on a full disk is counted, and reported when the disk has room again."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.facts.events import StageStarted, TelemetryDropped
from resilience.facts.identity import Origin
from resilience.system import files
from resilience.system.background import WRITER
from resilience.telemetry.emitter import Emitter
from resilience.telemetry.recording import RecordFile, RecordTail


def test_all_records_that_a_full_disk_lost_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.jsonl"
    file = RecordFile(path)
    emitter = Emitter(Origin("job", "node", "monitor", 1, initial_rank=0), [file])
    with monkeypatch.context() as full:
        full.setattr(files.LineFile, "write", lambda self, line: False)
        for number in range(10):
            emitter.emit(StageStarted("run"))
            assert WRITER.flush(60.0)
            assert file.dropped == number + 1  # also before the next record asks for the losses
    emitter.emit(StageStarted("check"))
    file.close()
    reported, last = [record.event for record in RecordTail(path).added()]
    assert reported == TelemetryDropped("record", "sink", 10)
    assert last == StageStarted("check")
    assert file.dropped == 10
