"""Numbers of restarts that rest on incomplete records say so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from resilience.cli import main
from tests.support import launch_streams, record_streams
from tests.support.launch_streams import launched
from tests.support.record_streams import job

NUMBER = r"(at least )?(\d+) (in place|by the launcher)"


def shown(folder: Path, capsys: pytest.CaptureFixture[str], page: Path) -> tuple[str, dict[str, Any], str]:
    """The report as text, in JSON, and as a page."""
    assert main(["report", str(folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert main(["report", str(folder), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main(["report", str(folder), "--html", str(page)]) == 0
    capsys.readouterr()
    return text, plain, " ".join(page.read_text().split())


def test_whole_records_give_exact_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = job([record_streams.Fault("exception", 1, 0)], world=20).write(tmp_path / "run")
    text, plain, page = shown(folder, capsys, tmp_path / "page.html")
    assert plain["completeness"]["has_all_records"]
    assert "restarts 1 in place (20 rank restarts, median " in text
    assert "at least" not in text and "at least" not in page


def test_few_missing_ranks_leave_lower_bounds_and_durations_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job([record_streams.Fault("exception", 1, 0)], world=20).write(tmp_path / "run")
    (folder / "records" / "node-7.jsonl").unlink()
    text, plain, page = shown(folder, capsys, tmp_path / "page.html")
    assert not plain["completeness"]["has_all_records"]
    assert "restarts at least 1 in place (at least 19 rank restarts, median " in text
    assert re.search(r"incidents at least 1, lost at least \d", text)
    assert re.search(r"at least 1 incident, at least \S+ ?\S* lost", page)


def test_node_without_records_leaves_lower_bounds_and_no_durations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = launched([launch_streams.Fault("kill", 1)], nodes=2).write(tmp_path / "run")
    for path in (folder / "records").glob("node1-*"):
        path.unlink()
    text, plain, _ = shown(folder, capsys, tmp_path / "page.html")
    (took,) = plain["restarts"]
    assert (took["restarts"], took["ranks"]) == (1, 2)
    assert (took["median_s"], took["p95_s"], took["max_s"]) == (None, None, None)
    expected = "at least 1 by the launcher (at least 2 rank restarts, durations unknown: too many records are missing)"
    assert f"restarts {expected}" in text


@pytest.mark.parametrize("missing", ["", "node1-*", "node1-agent*", "node1-2*"])
def test_report_and_status_agree_whether_a_number_is_exact(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = launched([launch_streams.Fault("kill", 1)], nodes=2, is_running=True).write(tmp_path / "run")
    for path in (folder / "records").glob(missing or "nothing"):
        path.unlink()
    text, _, _ = shown(folder, capsys, tmp_path / "page.html")
    main(["status", str(folder)])
    status = " ".join(capsys.readouterr().out.split())
    expected = {"at least " if missing else ""}
    assert {match[0] for match in re.findall(NUMBER, text)} == expected
    assert {match[0] for match in re.findall(NUMBER, status)} == expected
    assert ("at most" in status) == bool(missing)
