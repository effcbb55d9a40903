"""The reading commands name what they cannot read; a run that cannot be read is no run without faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.cli import main
from resilience.facts.identity import Job
from resilience.telemetry.recording import write_job
from tests.support.record_streams import Fault, job

REASON = "cannot be read: Not a directory"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run whose records cannot be listed, whatever the user may do: they are no folder."""
    run = tmp_path / "run"
    assert write_job(Job("job"), run)
    (run / "records").touch()
    return run


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["status", "--watch"],
        ["status", "--json"],
        ["logs"],
        ["logs", "--rank", "0"],
        ["logs", "--around", "1"],
        ["trace"],
        ["trace", "--json"],
        ["trace", "--format", "perfetto"],
        ["trace", "--format", "otlp-json"],
    ],
    ids=" ".join,
)
def test_records_that_cannot_be_listed_are_named(
    arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *options = arguments
    assert main([verb, str(folder), *options]) == 2
    shown = capsys.readouterr()
    assert f"{folder}/records {REASON}" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("verb", ["status", "logs", "report", "incidents", "trace"])
@pytest.mark.parametrize("name", [[], ["job"]], ids=["newest", "named"])
def test_folder_of_the_runs_that_cannot_be_listed_is_named(
    verb: str,
    name: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = tmp_path / "runs"
    root.symlink_to(root)  # nobody can list it, root neither
    monkeypatch.setenv("RESILIENCE_RUN_DIR", str(root))
    assert main([verb, *name]) == 2
    assert f"{root} cannot be read: Too many levels of symbolic links" in capsys.readouterr().err


def test_run_is_found_by_its_folder_if_the_folder_of_the_runs_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs"
    root.symlink_to(root)
    monkeypatch.setenv("RESILIENCE_RUN_DIR", str(root))
    folder = job([Fault("exception", 1, 0)]).write(tmp_path / "run")
    assert main(["status", str(folder)]) == 0
    assert capsys.readouterr().out


def test_run_that_cannot_be_read_is_no_run_to_compare_with(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = job([Fault("exception", 1, 0)]).write(tmp_path / "other")
    assert main(["logs", str(other), "--diff", str(folder)]) == 2
    assert f"{folder}/records {REASON}" in capsys.readouterr().err


def test_query_names_records_that_cannot_be_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("duckdb")
    assert main(["logs", str(folder), "--sql", "select count(*) from records"]) == 0
    assert f"records {REASON}" in capsys.readouterr().err


def test_logs_of_a_run_name_a_folder_that_cannot_be_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its other lines are shown."""
    folder = job([Fault("exception", 1, 0)]).write(tmp_path / "run")
    (folder / "output").touch()
    assert main(["logs", str(folder)]) == 0
    shown = capsys.readouterr()
    assert f"output {REASON}" in shown.err
    assert shown.out


def test_report_of_records_that_cannot_be_listed_does_not_say_that_there_are_no_incidents(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "incomplete: records are missing" in text
    assert "none in the readable records" in text
