"""Timings that cannot be read are part of what a report says to be missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilience.cli import main
from resilience.report.condensed import Report, report
from resilience.report.terminal import report_lines
from resilience.run_folder.load import load
from resilience.system.render import plain
from resilience.telemetry.durations import UNREADABLE
from resilience.telemetry.timings import Timings
from tests.support import rank_timings
from tests.support.record_streams import Fault, job

RANKS = 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with one incident, and timings of each rank. The name of the node has a dot."""
    folder = job([Fault("exception", 1, 0)], world=RANKS).write(tmp_path / "run")
    (folder / "timings").mkdir(exist_ok=True)
    for rank in range(RANKS):
        timings = Timings()
        rank_timings.add_durations(timings, [("data", 1.0)] * 10)
        rank_timings.write(folder, "n.a", rank, timings)
    return folder


def damage(folder: Path) -> None:
    """Leave the timings of ranks 1 to 4 torn, garbage, no file, and set aside by the run."""
    one, two, three, four = (folder / "timings" / f"n.a-{rank}.hist" for rank in range(1, RANKS))
    one.write_bytes(one.read_bytes()[:-9])
    two.write_bytes(b"\x00\xff garbage")
    three.unlink()
    three.mkdir()
    four.rename(four.with_name(four.name + UNREADABLE))


def style_of_the_end(condensed: Report) -> str:
    (line,) = (line for line in report_lines(condensed, 80, 0) if plain(line).startswith("  ended"))
    return line[-1][1]


def test_readable_timings_leave_the_run_whole(folder: Path) -> None:
    condensed = report(load(folder))
    assert condensed.completeness.is_whole
    assert [missing.file for missing in condensed.missing] == ["job.json"]
    assert [section.count for section in condensed.sections if section.name == "data"] == [10 * RANKS]


def test_unread_timings_are_counted_and_named_in_text_json_and_page(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    words = "4 files of timings of ranks 1-4 cannot be read; sections, steps per second and what-ifs lack them"
    assert main(["report", str(folder), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text().replace("\n", "")
    assert f'<div class="verdict"><p><b>Timings:</b> {words}.</p>' in page
    assert "Records are" not in page
    capsys.readouterr()
    assert main(["report", str(folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f" timings {words} " in text and " records incomplete" not in text
    assert "timings/n.a-3.hist: cannot be read: Is a directory" in text
    assert main(["report", str(folder), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    names = {"n.a-1.hist", "n.a-2.hist", "n.a-3.hist", f"n.a-4.hist{UNREADABLE}"}
    assert set(plain["completeness"]["timings"]) == names
    assert not plain["completeness"]["is_whole"]
    assert {missing["file"] for missing in plain["missing"]} == {"job.json", *(f"timings/{name}" for name in names)}


def test_incidents_rest_on_records_alone(folder: Path) -> None:
    whole = report(load(folder))
    damage(folder)
    damaged = report(load(folder))
    assert damaged.completeness.has_all_records and not damaged.completeness.is_whole
    assert (damaged.incidents, damaged.times, damaged.restarts) == (whole.incidents, whole.times, whole.restarts)
    assert style_of_the_end(whole) == style_of_the_end(damaged) == "green"


def test_one_incident_lacks_records_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(folder)
    assert main(["report", str(folder), "--incident", "1"]) == 0
    assert capsys.readouterr().err == ""
    (folder / "records" / "node-3.jsonl").unlink()
    assert main(["report", str(folder), "--incident", "1"]) == 0
    missing = capsys.readouterr().err
    assert "records of rank 3 are missing" in missing and "timings" not in missing


def test_missing_records_and_unread_timings_are_named_apart(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    (folder / "records" / "node-3.jsonl").unlink()
    assert main(["report", str(folder), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text().replace("\n", "")
    records = (
        "<p><b>Records are incomplete: records of rank 3 are missing</b>; this page covers the readable records.</p>"
    )
    assert f'<div class="verdict unsure">{records}<p><b>Timings:</b> 4 files' in page
    capsys.readouterr()
    assert main(["report", str(folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert " records incomplete: records of rank 3 are missing timings 4 files of timings" in text


def test_folder_of_timings_that_cannot_be_listed_is_missing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "timings").rename(tmp_path / "elsewhere")
    assert report(load(folder)).completeness.is_whole  # a job without sections has no such folder
    (folder / "timings").touch()
    assert main(["report", str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert " timings cannot be read; sections, steps per second and what-ifs lack them" in shown


def test_sql_says_that_timings_are_missing_if_the_query_reads_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("duckdb", reason="the extra `analysis` is not installed")
    damage(folder)
    assert main(["logs", str(folder), "--sql", "SELECT count(*) FROM timings"]) == 0
    assert "4 files of timings of ranks 1-4 cannot be read" in capsys.readouterr().err
    assert main(["logs", str(folder), "--sql", "SELECT count(*) FROM records"]) == 0
    assert capsys.readouterr().err == ""


def test_unread_snapshots_of_ranks_are_counted_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They hold the limits of sections."""
    (folder / "timings" / "n.a-2.signs").write_bytes(b"{")
    (folder / "timings" / "n.a-3.signs").mkdir()
    condensed = report(load(folder))
    assert condensed.completeness.timings == ("n.a-2.signs", "n.a-3.signs")
    assert {missing.file for missing in condensed.missing} >= {"timings/n.a-2.signs", "timings/n.a-3.signs"}
    assert main(["report", str(folder)]) == 0
    assert "2 files of timings of ranks 2-3 cannot be read" in " ".join(capsys.readouterr().out.split())
