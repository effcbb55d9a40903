"""`resilience trace`: one restart in 80 columns with whom it waited for; files for trace viewers."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from resilience.attribution.waterfall import PhaseRow, Step, Waterfall
from resilience.cli import main, trace
from resilience.facts import events
from resilience.facts.identity import Job
from resilience.system.render import plain
from resilience.telemetry.recording import write_job
from resilience.trace.terminal import summary, waterfall_lines
from tests.support import launch_streams
from tests.support.record_streams import Fault, Kind, job


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("RESILIENCE_RUN_DIR", str(tmp_path / "runs"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return job([Fault("exception", 1, 0), Fault("kill", 2, 1, 20)], spares=1).write(tmp_path / "runs" / "job")


WAITED = Waterfall(
    1,
    "inprocess",
    "exception",
    1_700_000_000_000_000_000,
    0.41,
    (
        PhaseRow("abort", 0.0, 0.005, 0.006, 0.005, 0.006, 2, 8),
        PhaseRow("finalize", 0.005, 0.006, 0.306, 0.001, 0.3, 5, 8),
        PhaseRow("resume", 0.306, 0.32, 0.41, 0.01, 0.1, 2, 8),
    ),
    (
        Step("abort", 5, 1_700_000_000_000_000_000, 0.006),
        Step("finalize", 5, 1_700_000_000_006_000_000, 0.3),
        Step("resume", 2, 1_700_000_000_306_000_000, 0.104),
    ),
)


def test_summary_says_whom_all_the_others_waited_for() -> None:
    assert summary(WAITED) == "of 410 ms, 300 ms waiting for rank 5 in finalize"


def test_waterfall_looks_like_this() -> None:
    assert [plain(line) for line in waterfall_lines(WAITED, 80)] == [
        "Restart after incident 1  exception, 2023-11-14 22:13:20 UTC",
        "  of 410 ms, 300 ms waiting for rank 5 in finalize",
        "",
        "                0                         410 ms    median  slowest",
        "  abort         █                                     5 ms     6 ms  rank 2",
        "  finalize      █░░░░░░░░░░░░░░░░░░░░░░░              1 ms   300 ms  rank 5",
        "  resume                                █░░░░░░░     10 ms   100 ms  rank 2",
        "                █ until half had finished the phase, ░ until the last one had",
        "",
        "  Critical path",
        "       0 ms       6 ms   1 %  waiting for rank 5 in abort",
        "       6 ms     300 ms  73 %  waiting for rank 5 in finalize",
        "     306 ms     104 ms  25 %  waiting for rank 2 in resume",
    ]


def test_long_times_in_the_waterfall_do_not_run_together() -> None:
    row = PhaseRow("resume", 0.0, 30.5, 6000.0, 30.5, 6000.0, 12, 8)
    lines = [plain(line) for line in waterfall_lines(msgspec.structs.replace(WAITED, rows=(row,)), 80)]
    (line,) = [line for line in lines if "  resume  " in line]
    assert line.endswith("30.5 s 1 h 40 min  rank 12")
    minutes = msgspec.structs.replace(row, median_s=90.5, max_s=3599.0)
    lines = [plain(line) for line in waterfall_lines(msgspec.structs.replace(WAITED, rows=(minutes,)), 80)]
    assert any("1 min 30 s 59 min 59 s" in line for line in lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("kind", "world"), [*((kind, 3) for kind in get_args(Kind)), ("kill", 300)])
def test_every_line_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: Kind, world: int) -> None:
    folder = job([Fault(kind, 1, 0, 13), Fault("exception", 2, 1)], world=world, spares=1).write(tmp_path / "run")
    assert main(["trace", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 32


def test_restart_by_the_launcher_fits_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = launch_streams.launched([launch_streams.Fault("kill", 1)], nodes=2).write(tmp_path / "run")
    assert main(["trace", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("rendezvous" in line for line in lines)


@pytest.mark.parametrize(("node", "hours"), [("node0", -2), ("node1", 2)])
def test_restart_is_not_longer_for_a_clock_that_was_set_during_the_run(
    node: str, hours: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = launch_streams.launched([launch_streams.Fault("kill", 1)], nodes=2)
    assert main(["trace", str(told.write(tmp_path / "right")), "--json"]) == 0
    right = json.loads(capsys.readouterr().out)
    failed_ns = min(record.wall_ns for record in told.records if isinstance(record.event, events.CycleEnded))
    for key, records in told.files.items():
        if key[0] == node:
            told.files[key] = [
                msgspec.structs.replace(record, wall_ns=record.wall_ns + hours * 3600 * 10**9)
                if record.wall_ns > failed_ns - 10**9
                else record
                for record in records
            ]
    folder = told.write(tmp_path / "run")
    assert main(["trace", str(folder), "--json"]) == 0
    restart = json.loads(capsys.readouterr().out)
    assert 0.5 * right["seconds"] < restart["seconds"] <= right["seconds"]
    assert restart["left_out"] == ["node1"]
    assert main(["trace", str(folder)]) == 0
    assert "Without node1: a clock was set during the run" in capsys.readouterr().out
    assert main(["logs", str(folder)]) == 0
    notes = capsys.readouterr().err
    assert "the clock of node0 or node1 was set during the run: not corrected" in notes
    assert "their clocks agree" not in notes


def test_incident_is_the_one_asked_for_else_the_longest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for number in ("1", "2"):
        assert main(["trace", str(run), "--incident", number, "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert [one["incident"] for one in told] == [1, 2]
    assert main(["trace", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) in told


def test_trace_that_a_viewer_knows_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  Trace ")]
    assert main(["trace", str(run), "--format", "otlp-json"]) == 0
    assert f'"{line.split()[-1]}"' in capsys.readouterr().out


def test_perfetto_file_is_one_json_object(run: Path, tmp_path: Path) -> None:
    assert main(["trace", str(run), "--format", "perfetto", "--output", str(tmp_path / "trace.json")]) == 0
    found = json.loads((tmp_path / "trace.json").read_text())
    assert {event["ph"] for event in found["traceEvents"]} == {"M", "X", "i", "s", "f"}


def test_trace_of_a_job_is_the_one_that_it_was_started_in(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEPARENT", f"00-{'c' * 32}-{'d' * 16}-01")  # of whoever looks at it
    (run / "job.json").unlink(missing_ok=True)
    assert write_job(Job("job", traceparent=f"00-{'a' * 32}-{'b' * 16}-01"), run)
    assert main(["trace", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trace_id"] == "a" * 32
    assert main(["trace", str(run), "--format", "otlp-json"]) == 0
    messages = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    spans = [span for m in messages for r in m["resourceSpans"] for s in r["scopeSpans"] for span in s["spans"]]
    assert {span["traceId"] for span in spans} == {"a" * 32}
    assert {span["parentSpanId"] for span in spans if span["name"] == "inprocess.call"} == {"b" * 16}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--incident", "9"], "has incidents 1 to 2"),
        (["--format", "perfetto", "--output", "/proc/nowhere/trace.json"], "cannot be written"),
        (["--output", "./nowhere/trace.json"], "--output ./nowhere/trace.json: cannot be written"),
        (["--output", "/"], "--output /: cannot be written: Is a directory"),
    ],
)
def test_wrong_use_is_reported(run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main(["trace", str(run), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_output_file_is_kept_if_there_is_nothing_to_write(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "restart.txt"
    file.write_text("of yesterday")
    assert main(["trace", str(run), "--incident", "9", "-o", str(file)]) == 2
    assert file.read_text() == "of yesterday"


def test_output_file_in_a_folder_where_nothing_can_be_created_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "trace.json"
    output.write_text("old")
    before = set(tmp_path.iterdir())
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert main(["trace", str(run), "--format", "perfetto", "-o", str(output)]) == 0
    assert json.loads(output.read_text()) and set(tmp_path.iterdir()) == before


def test_output_file_is_replaced_as_a_whole(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trace.json"
    file.write_text("of yesterday")
    file.chmod(0o600)

    def torn(*_: object) -> Iterator[dict[str, Any]]:
        yield {"ph": "X"}
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(trace, "perfetto", torn)
        assert main(["trace", str(run), "--format", "perfetto", "-o", str(file)]) == 2
    assert file.read_text() == "of yesterday"
    assert main(["trace", str(run), "--format", "perfetto", "-o", str(file)]) == 0
    assert json.loads(file.read_text())["traceEvents"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "trace.json"}


def test_output_through_a_link_leaves_the_link(run: Path, tmp_path: Path) -> None:
    """/dev/stdout is one."""
    file, link = tmp_path / "restart.txt", tmp_path / "link"
    link.symlink_to(file)
    assert main(["trace", str(run), "-o", str(link)]) == 0
    assert link.is_symlink()
    assert "Critical path" in file.read_text()


def test_run_without_a_restart_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = job().write(tmp_path / "run")
    assert main(["trace", str(folder)]) == 2
    assert "has no incidents; --format perfetto" in capsys.readouterr().err


def test_incident_without_a_restart_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("resilience.cli.trace.waterfall", lambda history, incident, clocks: None)
    assert main(["trace", str(run), "--incident", "2"]) == 2
    assert "has no recorded restart of incident 2; --format perfetto" in capsys.readouterr().err
