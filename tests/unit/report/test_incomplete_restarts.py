"""Numbers of restarts that rest on incomplete records say so."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resilience.cli import main
from tests.support import launch_streams, record_streams
from tests.support.launch_streams import Launched, launched
from tests.support.nested_streams import nested, restart_in_place
from tests.support.record_streams import job

NUMBER = r"(about )?(\d+) (in place|by the launcher)"


def numbered(told: Launched) -> Launched:
    """Number the records as their processes do, so that none is missing."""
    for records in told.files.values():
        numbers: defaultdict[tuple[str, int, int, int], Iterator[int]] = defaultdict(itertools.count)
        for place, record in enumerate(records):
            origin = record.origin
            cycle, call = 0 if origin.role == "agent" else origin.cycle, origin.call if origin.role == "rank" else 0
            records[place] = msgspec.structs.replace(
                record, sequence=next(numbers[origin.role, origin.pid, cycle, call])
            )
    return told


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
    assert "about " not in text and not re.search(r"about \d", page)


def test_few_missing_ranks_leave_approximate_numbers_and_durations_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job([record_streams.Fault("exception", 1, 0)], world=20).write(tmp_path / "run")
    (folder / "records" / "node-7.jsonl").unlink()
    text, plain, page = shown(folder, capsys, tmp_path / "page.html")
    assert not plain["completeness"]["has_all_records"]
    assert "restarts about 1 in place (about 19 rank restarts, median " in text
    assert re.search(r"incidents about 1, lost about \d", text)
    assert re.search(r"about 1 incident, about \S+ ?\S* lost", page)


def test_node_without_records_leaves_approximate_numbers_and_no_durations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = launched([launch_streams.Fault("kill", 1)], nodes=2).write(tmp_path / "run")
    for path in (folder / "records").glob("node1-*"):
        path.unlink()
    text, plain, _ = shown(folder, capsys, tmp_path / "page.html")
    (took,) = plain["restarts"]
    assert (took["restarts"], took["ranks"]) == (1, 2)
    assert (took["median_s"], took["p95_s"], took["max_s"]) == (None, None, None)
    expected = "about 1 by the launcher (about 2 rank restarts, durations unknown: too many records are missing)"
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
    expected = {"about " if missing else ""}
    assert {match[0] for match in re.findall(NUMBER, text)} == expected
    assert {match[0] for match in re.findall(NUMBER, status)} == expected
    assert bool(re.search(r"\(cycle 1\), about \d+ left", status)) == bool(missing)


@pytest.mark.parametrize("missing", ["node0-agent", "node1-agent", "node0-1"])
def test_numbers_that_grow_without_a_file_are_not_shown_as_lower_bounds(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an agent, or the rank that died, recorded shows that the restart in place was for the launcher's death."""
    told = nested([launch_streams.Fault("kill", 1)], nodes=2, has_steps=True)
    restart_in_place(told, 0, reached=5, resumed=0, dead=1)
    folder = numbered(told).write(tmp_path / "run")
    text, whole, _ = shown(folder, capsys, tmp_path / "page.html")
    assert whole["completeness"]["has_all_records"] and "about " not in text
    (folder / "records" / f"{missing}.jsonl").unlink()
    text, plain, page = shown(folder, capsys, tmp_path / "page.html")
    assert (len(whole["incidents"]), len(plain["incidents"])) == (1, 2)
    assert [took["restarts"] for took in whole["restarts"]] == [0, 1]
    assert [took["restarts"] for took in plain["restarts"]] == [1, 1]
    assert "restarts about 1 in place (about 3 rank restarts" in text and "incidents about 2, lost about" in text
    assert "about 2 incidents, about" in page
    main(["status", str(folder)])
    status = " ".join(capsys.readouterr().out.split())
    assert re.search(r"restarts about 1 by the launcher \(cycle 1\)", status)
