"""SQL over a run: documented views, nothing silently left out, errors that help."""

from __future__ import annotations

import errno
import importlib
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience.cli import main
from resilience.errors import ConfigurationError
from resilience.facts import events
from resilience.history.wrapped_rank import CAUSES
from resilience.report.condensed import report
from resilience.run_folder.load import load
from resilience.run_folder.query import VIEWS, run_query
from resilience.telemetry.durations import Header, Recorder
from tests.support import disks, launch_streams
from tests.support.lines import AT, SECOND, log_line, record_line, write
from tests.support.nested_streams import nested
from tests.support.record_streams import Fault, job
from tests.support.server import ROOT
from tests.unit.run_folder.test_merge import met

pytest.importorskip("duckdb", reason="the extra `analysis` is not installed")


def answers(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with run_query(folder, sql) as answer:
        return list(answer.rows)


WORLD = 10  # one of ten ranks may have incomplete records; the view `seconds` has those of the others


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """One node's run with all that the views show, and two lines that are nothing."""
    folder = job([Fault("kill", 1, 0)], world=WORLD).write(tmp_path / "it's a run")
    write(folder, "logs/node-1.jsonl", log_line("saved", AT, 1, path="/x", step=4), b"{torn")
    with (folder / "records" / "node-0.jsonl").open("ab") as file:
        file.write(b"\xff\n")
    write(folder, "output/2/3.err", b"2023-11-14T22:13:21Z ERROR gave \xff up\n")
    recorder = Recorder(folder, Header("job", "node", 7, 8), at=1000.0)
    recorder.started("warm", 1000.0, cycle=3)
    recorder.add("io", 1.0, 1000.5)
    recorder.add("io", 3.0, 1001.5)
    recorder.add("heartbeat", 0.5, 1001.0)
    recorder.add("io", 9.0, 1002.0, "cut", is_failed=True)
    recorder.add("io", 7.0, 1003.0, "killed")
    recorder.close(1010.0)
    return folder


def test_incidents_blame_no_rank_whose_records_are_missing_as_the_report_does(tmp_path: Path) -> None:
    """Rank 2 did not answer, by the records that are left. The end of its file is lost."""
    told = job([Fault("communication", 1, 0)], world=4, seed=5)
    lines = told.files[2]
    answer = next(place for place, line in enumerate(lines) if isinstance(line.event, events.IterationDecided))
    del lines[answer : answer + 3]
    folder = told.write(tmp_path / "run")
    (incident,) = report(load(folder)).incidents
    assert (incident.verdict.first_blamed, incident.category) == (None, "unknown")
    ((kind, category, first),) = answers(folder, "SELECT kind, category, first_rank FROM incidents")
    assert (kind, category, first) == (incident.kind, "unknown", None)


@pytest.mark.parametrize("view", VIEWS)
def test_view_has_the_columns_it_promises_and_the_docs_explain_them(run: Path, view: str) -> None:
    with run_query(run, f"SELECT * FROM {view}") as answer:
        assert answer.columns == VIEWS[view]
        assert list(answer.rows)
    page = (ROOT / "docs" / "logs.md").read_text()
    assert f"| `{view}` |" in page
    assert [column for column in VIEWS[view] if f"`{column}`" not in page] == []


def test_records_have_their_place_their_level_and_their_fields(run: Path) -> None:
    told = [record for record in job([Fault("kill", 1, 0)], world=WORLD).records if record.event.level == "error"]
    found = answers(
        run,
        "SELECT wall_ns, cycle, iteration, initial_rank, event, fields->>'$.record.interruption' FROM records "
        "WHERE level = 'error' ORDER BY file, sequence",
    )
    assert sorted(found) == sorted(
        (r.wall_ns, 0, r.origin.iteration, r.origin.initial_rank, "rank.interrupted", r.event.record.interruption.value)
        for r in told
        if isinstance(r.event, events.RankInterrupted)
    )
    assert answers(run, "SELECT count(*) FROM records") == [(len(job([Fault("kill", 1, 0)], world=WORLD).records),)]


def test_logs_hold_log_lines_and_plain_lines(run: Path) -> None:
    found = answers(run, "SELECT kind, level, event, initial_rank, cycle, step, file FROM logs ORDER BY ts")
    assert found == [
        ("log", "info", "saved", 1, None, 4, "logs/node-1.jsonl"),
        ("text", "error", "2023-11-14T22:13:21Z ERROR gave \\xff up", 3, 2, None, "output/2/3.err"),
    ]
    assert answers(run, "SELECT fields->>'$.path' FROM logs WHERE event = 'saved'") == [("/x",)]
    assert answers(run, "SELECT epoch_ns(ts) FROM logs WHERE kind = 'text'") == [(AT + SECOND,)]


def test_names_of_views_may_be_written_in_capitals(run: Path) -> None:
    assert answers(run, "SELECT count(*) FROM INCIDENTS") == [(1,)]
    assert answers(run, "SELECT count(*) FROM Phases") == answers(run, "SELECT count(*) FROM phases") != [(0,)]


def test_log_lines_and_plain_lines_have_the_clock_of_their_node(tmp_path: Path) -> None:
    ahead = 90 * SECOND
    met(tmp_path, "a", 0, 0, (0,), (1000,))
    met(tmp_path, "b", 1, ahead, (0,), (1000,))
    started = events.WorkerStarted(local_rank=0, worker_rank=1, worker_pid=7, how="cold")
    write(tmp_path, "records/b-agent.jsonl", record_line(started, AT + ahead, "b"))
    write(tmp_path, "logs/b-1.jsonl", log_line("logged", AT + ahead + SECOND, 1, node="b"))
    write(tmp_path, "output/0/1.out", b"printed\n")
    write(tmp_path, "output/0/1.out.times", b"0 %d\n" % (AT + ahead + 2 * SECOND))
    found = answers(tmp_path, "SELECT event, epoch_ns(ts) FROM logs ORDER BY ts")
    assert found == [("logged", AT + ahead + SECOND), ("printed", AT + ahead + 2 * SECOND)]


def test_timings_have_a_row_for_each_rank_and_section(run: Path) -> None:
    columns = "node, rank, section, outcome, count, sum_s, mean_s, max_s"
    assert answers(run, f"SELECT {columns} FROM timings ORDER BY section, outcome") == [
        ("node", 7, "(heartbeat)", "completed", 1, 0.5, 0.5, 0.5),
        ("node", 7, "io", "completed", 2, 4.0, 2.0, 3.0),
        ("node", 7, "io", "failed", 1, 9.0, 9.0, 9.0),
    ]
    ((median, most),) = answers(run, "SELECT p50_s, p99_s FROM timings WHERE max_s = 3.0")
    assert 1.0 <= median <= 1.01
    assert most == 3.0


def test_files_are_named_the_same_inside_the_run_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "SELECT DISTINCT file FROM records UNION SELECT DISTINCT file FROM logs ORDER BY file"
    elsewhere = answers(run, names)
    monkeypatch.chdir(run)
    assert answers(Path("."), names) == elsewhere
    assert ("logs/node-1.jsonl",) in elsewhere


def test_lines_that_cannot_be_read_are_counted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(run), "--sql", "SELECT count(*) AS n FROM logs"]) == 0
    said = capsys.readouterr()
    assert said.out.split() == ["n", "2"]
    assert "2 lines could not be parsed, left out" in said.err


def test_lines_that_are_no_objects_are_left_out_and_counted(tmp_path: Path) -> None:
    no_objects = b'[1]\n3\n"x"\nnull\n'
    write(tmp_path, "records/n-3.jsonl", record_line(events.MonitorStarted(5), AT, rank=3), no_objects)
    write(tmp_path, "logs/n-3.jsonl", log_line("saved", AT, 3), no_objects)
    sql = "SELECT (SELECT list(event) FROM records), (SELECT list(event) FROM logs)"
    with run_query(tmp_path, sql) as answer:
        assert (list(answer.rows), answer.bad) == ([(["monitor.started"], ["saved"])], 8)


@pytest.mark.parametrize("ts", [None, "yesterday", "2023-99-01T00:00:00Z", 5, {}])
def test_log_line_without_a_valid_time_has_none(tmp_path: Path, ts: object) -> None:
    write(tmp_path, "logs/n-3.jsonl", log_line("saved", AT, 3), log_line("odd", AT, 3, ts=ts))
    assert answers(tmp_path, "SELECT event, epoch_ns(ts) FROM logs ORDER BY ts") == [("saved", AT), ("odd", None)]


def test_json_gives_an_object_a_row(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(run), "--json", "--sql", "SELECT ts, event FROM logs WHERE kind = 'log'"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ts": "2023-11-14T22:13:20", "event": "saved"}


def test_run_with_nothing_in_it_has_empty_views(tmp_path: Path) -> None:
    write(tmp_path, "records/n-agent.jsonl")
    for view in VIEWS:
        assert answers(tmp_path, f"SELECT * FROM {view}") == []


@pytest.mark.parametrize("sql", ["SELEC", "SELECT nothing FROM logs", "SELECT 'x'::INTEGER FROM logs"])
def test_wrong_question_names_the_views(run: Path, sql: str) -> None:
    with pytest.raises(ConfigurationError, match=r"records\(ts, .*logs\(ts, .*timings\(node"):
        answers(run, sql)


@pytest.mark.parametrize("sql", ["", " ", ";", "-- SELECT 1"])
def test_query_without_a_statement_is_refused(run: Path, capsys: pytest.CaptureFixture[str], sql: str) -> None:
    assert main(["logs", str(run), "--sql", sql]) == 2
    assert "--sql: the query has no statement; write for example" in capsys.readouterr().err


def test_without_duckdb_the_extra_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.import_module

    def without(name: str) -> object:
        if name == "duckdb":
            raise ModuleNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", without)
    assert main(["logs", str(run), "--sql", "SELECT 1"]) == 2
    assert "pip install 'torch-resilience[analysis]'" in capsys.readouterr().err


def test_record_of_another_shape_is_not_dropped(tmp_path: Path) -> None:
    line = record_line(events.MonitorStarted(5), AT, rank=3).replace(b'"pid":7', b'"pid":"seven"')
    write(tmp_path, "records/n-3.jsonl", line)
    assert answers(tmp_path, "SELECT event, pid, initial_rank FROM records") == [("monitor.started", None, 3)]


def test_periods_are_the_histograms_that_limits_are_learned_from(run: Path) -> None:
    sql = "SELECT section, epoch(ts), epoch(until), count, sum_s, epoch(max_ts) FROM periods WHERE rank = 7 ORDER BY 1"
    assert answers(run, sql) == [
        ("(heartbeat)", 1000.0, 1010.0, 1, 0.5, 1001.0),
        ("io", 1000.0, 1010.0, 2, 4.0, 1001.5),
    ]


def test_calls_are_single_durations_with_the_start_they_follow(run: Path) -> None:
    columns = "section, epoch(ts), duration_s, outcome, number, since_start, start, cycle"
    assert answers(run, f"SELECT {columns} FROM calls WHERE section = 'io' ORDER BY ts") == [
        ("io", 1000.5, 1.0, "ok", 0, 0, "warm", 3),
        ("io", 1001.5, 3.0, "ok", 1, 1, "warm", 3),
        ("io", 1002.0, 9.0, "cut", 2, 2, "warm", 3),
        ("io", 1003.0, 7.0, "killed", 3, 3, "warm", 3),
    ]


@given(kinds=st.lists(st.sampled_from(["kill", "raise", "hang"]), min_size=1, max_size=2), is_nested=st.booleans())
@settings(max_examples=4, deadline=None)
def test_views_of_the_history_say_what_the_report_says(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[launch_streams.Kind], is_nested: bool
) -> None:
    faults = [launch_streams.Fault(kind, 1) for kind in kinds]
    told = nested(faults, nodes=2) if is_nested else launch_streams.launched(faults, nodes=2)
    folder = told.write(tmp_path_factory.mktemp("run") / "run")
    found = report(load(folder))
    rows = answers(folder, "SELECT number, kind, restart_s, lost_s FROM incidents ORDER BY number")
    assert rows == [
        (one.number, one.kind, None if one.restart is None else pytest.approx(one.restart.max_s), one.cost.lost_s)
        for one in found.incidents
    ]
    slowest = {(n, phase): s for n, phase, s in answers(folder, SLOWEST)}
    for one in found.incidents:
        for phase in one.phases:
            assert slowest[one.number, phase.name] == pytest.approx(phase.took.max_s)
    ((work, lost),) = answers(folder, f"SELECT sum(work_s), sum({LOST}) FROM seconds")
    assert found.times.ettr == pytest.approx(work / (work + lost))


def test_rework_of_a_rank_is_null_where_it_is_unknown(tmp_path: Path) -> None:
    for signs in (True, False):
        told = launch_streams.launched([launch_streams.Fault("kill", 1)], signs=signs)
        folder = told.write(tmp_path / str(signs))
        assert answers(folder, "SELECT bool_and(rework_s > 0), count(rework_s) > 0 FROM seconds") == [
            (signs or None, signs)
        ]


SLOWEST = """SELECT incident, phase, max(s) FROM (
    SELECT incident, phase, node, rank, sum(duration_s) AS s FROM phases GROUP BY ALL) GROUP BY ALL"""
LOST = " + ".join(f"coalesce({cause}_s, 0)" for cause in CAUSES)  # rework may be unknown


@pytest.mark.parametrize("name", ["sweep[1]", "a*", "what?", os.fsdecode(b"caf\xe9")])
def test_path_of_a_run_is_no_pattern_and_may_be_no_utf_8(tmp_path: Path, name: str) -> None:
    folder = job([Fault("kill", 1, 0)], world=2).write(tmp_path / name)
    for other in ("sweep1", "ab", "whatx"):
        job([Fault("kill", 1, 0)], world=3).write(tmp_path / other)
    assert answers(folder, "SELECT count(*) FROM records") == [(len(load(folder).records),)]
    assert answers(folder, "SELECT DISTINCT file FROM records WHERE initial_rank = 1") == [("records/node-1.jsonl",)]


def test_name_of_a_file_is_no_pattern(tmp_path: Path) -> None:
    write(tmp_path, "logs/rack[1]-0.jsonl", log_line("of the first rack", AT, 0))
    write(tmp_path, "logs/rack1-0.jsonl", log_line("of another node", AT, 0))
    assert answers(tmp_path, "SELECT file, event FROM logs ORDER BY file") == [
        ("logs/rack1-0.jsonl", "of another node"),
        ("logs/rack[1]-0.jsonl", "of the first rack"),
    ]


@pytest.mark.parametrize("name", ["sweep[1]", "caf\xe9"])
def test_run_is_read_where_the_folder_of_temporary_files_can_have_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(Path, "symlink_to", refuse_link)
    folder = job([Fault("kill", 1, 0)], world=2).write(tmp_path / name)
    job([Fault("kill", 1, 0)], world=3).write(tmp_path / "sweep1")
    assert answers(folder, "SELECT count(*) FROM records") == [(len(load(folder).records),)]
    assert answers(folder, "SELECT DISTINCT file FROM records WHERE initial_rank = 1") == [("records/node-1.jsonl",)]


def test_run_whose_path_needs_a_link_says_so_where_there_can_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Path, "symlink_to", refuse_link)
    folder = job([Fault("kill", 1, 0)], world=2).write(tmp_path / os.fsdecode(b"caf\xe9"))
    assert main(["logs", str(folder), "--sql", "SELECT * FROM logs"]) == 2
    assert "folder for temporary files: Operation not permitted; free space, or set TMPDIR" in capsys.readouterr().err


def refuse_link(link: Path, target: Path) -> NoReturn:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(target), None, str(link))


def test_disk_of_temporary_files_without_room_for_a_link_is_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with disks.mounted(tmp_path / "small", "nr_inodes=2") as small:
        monkeypatch.setattr("tempfile.tempdir", str(small))
        assert main(["logs", str(run), "--sql", "SELECT * FROM logs"]) == 2
    assert "--sql cannot write its tables in the folder for temporary files: No space left" in capsys.readouterr().err


def test_full_disk_of_temporary_files_is_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with disks.mounted(tmp_path / "small", "size=16k") as small:
        (small / "full").write_bytes(bytes(16 * 1024))
        monkeypatch.setattr("tempfile.tempdir", str(small))
        assert main(["logs", str(run), "--sql", "SELECT * FROM logs"]) == 2
    assert "--sql cannot write its tables in the folder for temporary files: No space left" in capsys.readouterr().err
