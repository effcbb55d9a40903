"""What is missing of a run is said first, and numbers that cannot be known are not told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilience.cli import main
from resilience.facts import events
from resilience.facts.identity import Job
from resilience.report.condensed import report
from resilience.run_folder.load import Missing, load
from resilience.telemetry.recording import write_job
from tests.support import launch_streams
from tests.support.launch_streams import launched
from tests.support.record_streams import Fault, job


def damage(path: Path) -> None:
    """Overwrite a record file from its middle on, as a broken disk may."""
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 3] + b"\x00\xff damaged \n" * 40)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return job([Fault("hang", 1, 0)], world=5).write(tmp_path / "run")


def test_whole_run_has_its_times(folder: Path) -> None:
    found = report(load(folder))
    assert found.completeness.is_whole
    assert found.times is not None


def test_run_of_which_most_files_are_damaged_tells_no_share_and_is_not_green(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in sorted((folder / "records").iterdir())[1:]:
        damage(path)
    found = report(load(folder))
    assert (found.completeness.damaged, found.completeness.lost) == ((1, 2, 3, 4), 160)
    assert found.times is None
    assert found.what_ifs == ()
    assert main(["report", str(folder), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text().replace("\n", "")
    assert '<div class="verdict unsure"><p><b>Records are incomplete: records of ranks 1-4 are missing' in page
    assert "of the time was productive" not in page
    capsys.readouterr()
    assert main(["report", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "incomplete: records of ranks 1-4 are missing" in text
    assert "time       unknown: too many records are missing" in text
    assert main(["report", str(folder), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert set(plain["times"].values()) == {None}
    assert not plain["completeness"]["is_whole"]


def seconds_by_sql(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[int, float]:
    """The productive seconds of each rank in the view `seconds`."""
    pytest.importorskip("duckdb", reason="the extra `analysis` is not installed")
    capsys.readouterr()
    assert main(["logs", str(folder), "--json", "--sql", "SELECT rank, work_s FROM seconds"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {row["rank"]: row["work_s"] for row in rows}


def test_sql_has_no_seconds_if_too_many_records_are_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert seconds_by_sql(folder, capsys).keys() == {0, 1, 2, 3, 4}
    for path in sorted((folder / "records").iterdir())[1:]:
        damage(path)
    assert seconds_by_sql(folder, capsys) == {}


def test_sql_has_the_seconds_of_the_ranks_of_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = job([Fault("exception", 1, 0)], world=20).write(tmp_path / "run")
    damage(folder / "records" / "node-7.jsonl")
    found, rows = report(load(folder)).times, seconds_by_sql(folder, capsys)
    assert found is not None
    assert rows.keys() == set(range(20)) - {7}
    assert sum(rows.values()) / len(rows) == pytest.approx(found.productive_s)


def test_few_damaged_files_leave_the_numbers_of_the_whole_ones(tmp_path: Path) -> None:
    folder = job([Fault("exception", 1, 0)], world=20).write(tmp_path / "run")
    whole = report(load(folder)).times
    damage(folder / "records" / "node-7.jsonl")
    found = report(load(folder))
    assert whole is not None and found.times is not None
    assert (found.completeness.damaged, found.times.ranks) == ((7,), 19)
    assert found.times.ettr == pytest.approx(whole.ettr, abs=0.01)


def test_damaged_records_of_an_agent_are_missing_of_all_its_ranks(tmp_path: Path) -> None:
    folder = launched([launch_streams.Fault("kill", 1)], nodes=2).write(tmp_path / "run")
    damage(folder / "records" / "node1-agent.jsonl")
    found = report(load(folder))
    assert found.completeness.damaged == (2, 3)
    assert found.times is None


def test_records_that_cannot_be_listed_are_missing(tmp_path: Path) -> None:
    assert write_job(Job("job", world_size=4), tmp_path)
    (tmp_path / "records").touch()  # no folder, so it cannot be listed
    found = report(load(tmp_path))
    assert found.completeness.files == ("records",)
    assert (found.completeness.is_whole, found.completeness.is_enough, found.times) == (False, False, None)


def test_last_line_that_is_torn_is_no_damage(folder: Path) -> None:
    path = next((folder / "records").iterdir())
    path.write_bytes(path.read_bytes()[:-7])
    assert report(load(folder)).completeness.is_whole


def test_rank_is_not_blamed_for_an_answer_that_is_missing_in_its_records(tmp_path: Path) -> None:
    """All ranks wait in a collective. The disk of rank 3 was full when it learned of the interruption."""
    told = job([Fault("communication", 1, 0)])
    answered = next(n for n, r in enumerate(told.files[3]) if isinstance(r.event, events.IterationDecided))
    folder = told.write(tmp_path / "run")
    assert report(load(folder)).incidents[0].verdict.culprits == ()
    path = folder / "records" / "node-3.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:answered] + lines[answered + 1 :]))
    found = report(load(folder))
    assert found.completeness.damaged == (3,)
    verdict = found.incidents[0].verdict
    assert (verdict.culprits, verdict.first) == ((), None)
    assert [candidate.rank for candidate in verdict.candidates] == [3]


def test_records_of_a_node_that_left_no_file_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its disk was its own. Of a rank without records nothing is known, so it is not cleared."""
    folder = launched([launch_streams.Fault("hang", 1)], nodes=2).write(tmp_path / "run")
    for path in (folder / "records").glob("node1-*"):
        path.unlink()
    found = report(load(folder))
    assert (found.completeness.damaged, found.times) == ((2, 3), None)
    assert Missing("records", "no records of ranks 2-3") in found.missing
    (incident,) = found.incidents
    assert not {2, 3} & {rank for group in incident.verdict.exonerated for rank in group.ranks}
    assert main(["report", str(folder)]) == 0
    assert "incomplete: records of ranks 2-3 are missing" in capsys.readouterr().out
