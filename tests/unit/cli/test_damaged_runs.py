"""Commands that read a damaged run say which records are missing: on stderr, in the words of the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from resilience.cli import main
from resilience.facts.events import HangsWatched
from resilience.report.condensed import report
from resilience.run_folder.load import incomplete_in_words, load
from tests.support.record_streams import Fault, job

COMMANDS = (
    ["trace"],
    ["trace", "--incident", "1"],
    ["trace", "--json"],
    ["trace", "--format", "perfetto"],
    ["trace", "--format", "otlp-json"],
    ["logs", "--around", "1"],
    ["logs", "--sql", "SELECT number FROM incidents"],
    ["logs", "--sql", "SELECT count(*) FROM Records"],
    ["report", "--incident", "1"],
)


def cut_lines(path: Path) -> None:
    """As a full disk leaves them: the beginning of each line is written, then the next one follows."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5] + [line[: len(line) // 2] + b"\n" for line in lines[5:9]] + lines[9:]))


def unreadable_bytes(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], b"\x00\xff\xfe\n" * 3, *lines[8:]]))


def no_file(path: Path) -> None:
    path.unlink()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return job([Fault("exception", 1, 0)], world=4).write(tmp_path / "run")


@pytest.mark.parametrize("damage", [cut_lines, unreadable_bytes, no_file], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_command_names_the_records_that_are_missing(
    arguments: list[str], damage: Callable[[Path], None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--sql" in arguments:
        pytest.importorskip("duckdb")
    damage(folder / "records" / "node-3.jsonl")
    words = incomplete_in_words(load(folder).completeness)
    assert "incomplete: records of rank 3 are missing" in words
    verb, *options = arguments
    assert main([verb, str(folder), *options]) == 0
    shown = capsys.readouterr()
    assert [line for line in shown.err.splitlines() if "incomplete" in line] == [f"{folder} is {words}"]
    assert "incomplete" not in shown.out and shown.out
    assert main(["report", str(folder)]) == 0
    assert words.split(", ")[0] in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_command_says_nothing_of_a_whole_run(
    arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--sql" in arguments:
        pytest.importorskip("duckdb")
    verb, *options = arguments
    assert main([verb, str(folder), *options]) == 0
    assert capsys.readouterr().err == ""


def test_damaged_run_without_a_restart_on_record_is_named_before_the_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the error reads as if the job had had no fault."""
    for path in (folder / "records").iterdir():
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]) + b"damaged\n")
    assert main(["trace", str(folder)]) == 2
    incomplete, error = capsys.readouterr().err.splitlines()[:2]
    assert incomplete == f"{folder} is {incomplete_in_words(load(folder).completeness)}"
    assert "has no incidents" in error


def test_query_that_reads_no_records_says_nothing_of_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("duckdb")
    no_file(folder / "records" / "node-3.jsonl")
    assert main(["logs", str(folder), "--sql", "SELECT count(*) FROM timings"]) == 0
    assert capsys.readouterr().err == ""


def test_report_as_json_has_the_missing_records_in_its_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    no_file(folder / "records" / "node-3.jsonl")
    assert main(["report", str(folder), "--incident", "1", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["completeness"]["damaged"] == list(report(load(folder)).completeness.damaged) == [3]
    assert shown.err == ""


@pytest.mark.parametrize("verb", ["report", "trace"])
def test_record_of_hang_detection_without_its_smallest_limit_is_read(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    streams = job([Fault("exception", 1, 0)])
    last = streams.files[0][-1]
    streams.files[0].append(
        msgspec.structs.replace(last, sequence=last.sequence + 1, event=HangsWatched({}, first_s=300.0))
    )
    assert main([verb, str(streams.write(tmp_path / "run"))]) == 0
    shown = capsys.readouterr()
    assert shown.out and not shown.err
    if verb == "report":
        assert "once its usual pauses are known, 10 × the longest" in " ".join(shown.out.split())
