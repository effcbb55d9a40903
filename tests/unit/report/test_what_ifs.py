"""`resilience report`: a reader of its text, its page or its JSON sees on what assumption each what-if rests."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import msgspec
import pytest

from resilience.cli import main
from resilience.facts import events
from resilience.facts.deadlines import of_section
from resilience.facts.records import Record
from resilience.telemetry.durations import Header, Recorder
from tests.support.record_streams import STARTED_NS, Fault, job

SLOWER = 20  # times the streams' usual speed: a checkpoint every 10 s fits into the work
MONO_NS = 10**12  # at which the streams' clocks start
ASSUMPTIONS = {
    "a limit of 1 s": "no healthy rank is ever silent for that long",
    "checkpoints every 10 s": "writing a checkpoint costs nothing",
    "one spare": "a spare takes the place of a lost rank at once",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A slow job for which a shorter limit, more checkpoints and a spare would each have saved time."""
    monkeypatch.setenv("COLUMNS", "80")
    told = job([Fault("hang", 1, 0, 14), Fault("exception", 1, 1, 14), Fault("kill", 2, 2, 24)])
    for rank, records in told.files.items():
        told.files[rank] = [slowed_down(record) for record in records]
    return told.write(tmp_path / "run")


def slowed_down(record: Record) -> Record:
    event = record.event
    if isinstance(event, events.StageEnded | events.IterationEnded | events.RestartEnded):
        event = msgspec.structs.replace(event, duration_s=event.duration_s * SLOWER)
    return msgspec.structs.replace(
        record,
        event=event,
        wall_ns=STARTED_NS + (record.wall_ns - STARTED_NS) * SLOWER,
        mono_ns=MONO_NS + (record.mono_ns - MONO_NS) * SLOWER,
    )


def test_each_what_if_in_the_text_names_its_assumption(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    shown = re.search(r" what if (.+?) restarts \d", text)
    assert shown is not None, text
    assert dict(re.findall(r"% with (.+?), if (.+?)(?:; \d|$)", shown[1])) == ASSUMPTIONS


def test_each_what_if_on_the_page_names_its_assumption(folder: Path, tmp_path: Path) -> None:
    assert main(["report", str(folder), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    table = re.search(r"<h3>What if</h3>.*?</table>", page, re.DOTALL)
    assert table is not None
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table[0].split("<tr>")[2:]]  # after the heading
    assert {html.unescape(row[0]): html.unescape(row[-1]) for row in rows} == {
        change: f"if {assumption}" for change, assumption in ASSUMPTIONS.items()
    }


def test_each_what_if_of_the_json_names_its_assumption(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["what_ifs"]
    assert {answer["kind"]: answer["assumes"] for answer in answers} == dict(
        zip(("limit", "checkpoints", "spares"), ASSUMPTIONS.values(), strict=True)
    )


def test_more_checkpoints_assume_the_recorded_time_to_write_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(folder, Header("job", "node", 0, 4), at=0.0)
    recorder.add(of_section("checkpoint"), 0.5, 1.0)
    recorder.close(2.0)
    assert main(["report", str(folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "with checkpoints every 10 s, if checkpoints cost only the time to write them" in text
