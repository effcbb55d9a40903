"""A run folder is read as far as it can be, and what cannot be read is told with file and line."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilience.facts.events import MonitorEnded, TelemetryDropped
from resilience.facts.identity import Job
from resilience.facts.records import from_line, to_line
from resilience.report.condensed import as_json, report
from resilience.run_folder.load import NOTED, Missing, is_run, load, runs_in
from resilience.telemetry.recording import write_job
from tests.fixtures.jobs import unpacked
from tests.support.launch_streams import launched
from tests.support.record_streams import Fault, job

JOB = Job("job", created_wall_ns=5, function="train.main", world_size=4, torch_version="2.13.0")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = job([Fault("kill", 1, 0)]).write(tmp_path / "run")
    assert write_job(JOB, folder)
    return folder


def records_of(run: Path, rank: int) -> Path:
    return run / "records" / f"node-{rank}.jsonl"


def test_whole_run_misses_nothing(run: Path) -> None:
    found = load(run)
    assert found.missing == ()
    assert found.job == JOB
    assert list(found.records) == job([Fault("kill", 1, 0)]).records


def test_job_file_is_written_once(run: Path) -> None:
    assert not write_job(Job("another"), run)
    assert load(run).job == JOB


def test_torn_last_line_is_reported_with_its_number(run: Path) -> None:
    path = records_of(run, 2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    found = load(run)
    assert Missing("records/node-2.jsonl", "the last line is torn", len(lines)) in found.missing
    assert len(found.records) == len(job([Fault("kill", 1, 0)]).records) - 1


def test_torn_line_in_the_middle_costs_that_line_only(run: Path) -> None:
    path = records_of(run, 2)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3][:20] + b"\n"
    path.write_bytes(b"".join(lines))
    found = load(run)
    bad, gap = found.missing
    assert (bad.file, bad.line) == ("records/node-2.jsonl", 4)
    assert bad.what.startswith("not a record")
    assert gap.what == "1 record missing in the sequence"


def test_two_records_on_a_line_are_damage_whatever_else_is_in_the_file(run: Path) -> None:
    path = records_of(run, 2)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].rstrip(b"\n")
    path.write_bytes(b"".join(lines))
    bad, gap = load(run).missing
    assert (bad.line, bad.what.startswith("not a record")) == (4, True)
    assert gap.what == "2 records missing in the sequence"


def test_records_that_are_not_there_show_by_their_numbers(run: Path) -> None:
    path = records_of(run, 0)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[5:]))
    assert [missing.what for missing in load(run).missing] == ["3 records missing in the sequence"]


def test_dropped_records_are_listed_as_dropped(run: Path) -> None:
    told = job([Fault("kill", 1, 0)])
    record = told.files[0][-1]
    dropped = msgspec.structs.replace(record, sequence=record.sequence + 3, event=TelemetryDropped("record", "sink", 2))
    with records_of(run, 0).open("ab") as file:
        file.write(to_line(dropped))
    (missing,) = load(run).missing
    assert missing.what == "2 records missing in the sequence, 2 of them reported as dropped"


def test_one_damaged_line_is_one_lost_record(run: Path) -> None:
    path = records_of(run, 2)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3][:40] + b"\xff\xfe" + lines[3][60:]
    path.write_bytes(b"".join(lines))
    assert load(run).completeness.lost == 1


def test_every_missing_record_of_a_launched_monitor_but_its_last_one_is_noticed(tmp_path: Path) -> None:
    """One monitor process watches the rank's worker of each cycle, and numbers its records from 0 each time."""
    folder = unpacked("launcher-faults", tmp_path)
    path = folder / "records" / "node0-2.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    cycles = [from_line(line).origin.cycle for line in lines]
    for number, cycle in enumerate(cycles):
        path.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
        is_last = cycle not in cycles[number + 1 :]
        assert load(folder).completeness.lost == (not is_last), number


def test_losses_that_a_monitor_states_at_its_end_count_even_without_a_gap(run: Path) -> None:
    told = job([Fault("kill", 1, 0)])
    record = told.files[0][-1]
    ended = msgspec.structs.replace(record, sequence=record.sequence + 1, event=MonitorEnded(dropped_records=4))
    with records_of(run, 0).open("ab") as file:
        file.write(to_line(ended))
    found = load(run)
    assert (found.completeness.lost, found.completeness.damaged) == (4, (0,))


def agents_of_a_replaced_container(tmp_path: Path, *lost: int) -> Path:
    """Return a run whose agent was replaced by one with the same pid. lost: records of the first agent."""
    told = launched()
    records = told.files["node0", None]
    before = [
        msgspec.structs.replace(record, sequence=number) for number, record in enumerate(records[: len(lost) + 4])
    ]
    kept = [record for record in before if record.sequence not in lost]
    told.files["node0", None] = [*kept, *records]
    return told.write(tmp_path / "run")


@pytest.mark.parametrize("lost", [(0,), (2,), (1, 3), (0, 1)])
def test_replaced_agent_with_the_same_pid_hides_no_loss_of_the_one_before(
    lost: tuple[int, ...], tmp_path: Path
) -> None:
    found = load(agents_of_a_replaced_container(tmp_path, *lost))
    assert (found.completeness.lost, found.completeness.files) == (len(lost), ("node0-agent",))


def test_replaced_agent_with_the_same_pid_is_no_loss(tmp_path: Path) -> None:
    assert load(agents_of_a_replaced_container(tmp_path)).completeness.is_whole


def test_first_two_records_of_a_process_may_be_in_the_other_order(tmp_path: Path) -> None:
    told = launched()
    records = told.files["node0", None]
    records[:2] = records[1::-1]
    assert load(told.write(tmp_path / "run")).completeness.is_whole


def test_rank_without_a_file_is_named(run: Path) -> None:
    records_of(run, 3).unlink()
    assert Missing("records", "no records of rank 3") in load(run).missing


@pytest.mark.parametrize("name", ["launcher-faults", "wrapper-in-launcher"])
def test_missing_file_of_an_agent_makes_the_records_incomplete(name: str, tmp_path: Path) -> None:
    folder = unpacked(name, tmp_path)
    assert load(folder).completeness.is_whole
    (folder / "records" / "node0-agent.jsonl").unlink()
    found = load(folder)
    assert Missing("records", "no records of the agent of node0") in found.missing
    assert not found.completeness.is_whole
    assert 0 in found.completeness.damaged
    assert as_json(report(found))["completeness"]["is_whole"] is False


def test_unreadable_file_of_an_agent_is_noted_once(tmp_path: Path) -> None:
    folder = unpacked("launcher-faults", tmp_path)
    (folder / "records" / "node0-agent.jsonl").write_bytes(b"nonsense\n")
    assert [missing.file for missing in load(folder).missing] == ["records/node0-agent.jsonl"]


def test_unreadable_file_is_reported_and_the_others_are_read(run: Path) -> None:
    records_of(run, 3).unlink()
    records_of(run, 3).mkdir()
    found = load(run)
    assert any(m.file == "records/node-3.jsonl" and "cannot be read" in m.what for m in found.missing)
    assert found.records


def test_many_bad_lines_are_counted(run: Path) -> None:
    with records_of(run, 0).open("ab") as file:
        file.write(b"nonsense\n" * (NOTED + 30))
    found = [missing for missing in load(run).missing if missing.file == "records/node-0.jsonl"]
    assert len(found) == NOTED + 1
    assert found[-1].what == "not records: 30 more lines"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"job_id": 5, "world_size": "x"}', b"\xff\xfe"])
def test_broken_job_file_is_reported_and_changes_nothing_else(run: Path, content: bytes) -> None:
    (run / "job.json").write_bytes(content)
    found = load(run)
    assert found.job is None
    assert [missing.file for missing in found.missing] == ["job.json"]
    assert found.records


@pytest.mark.parametrize("made", ["nothing", "empty", "no records", "file"])
def test_folder_that_is_no_run_gives_an_empty_one(tmp_path: Path, made: str) -> None:
    folder = tmp_path / "run"
    if made == "file":
        folder.write_text("x")
    elif made != "nothing":
        (folder / "records" if made == "no records" else folder).mkdir(parents=True)
    found = load(folder)
    assert (found.records, found.job) == ((), None)
    assert found.missing
    assert is_run(folder) == (made == "no records")


def test_newer_schema_is_read_as_far_as_known_and_reported(run: Path) -> None:
    path = records_of(run, 0)
    path.write_bytes(path.read_bytes().replace(b'"schema":1', b'"schema":2,"more":3', 1))
    (missing,) = load(run).missing
    assert (missing.line, "newer" in missing.what) == (1, True)


def test_records_of_a_newer_schema_are_one_note_for_each_file(run: Path) -> None:
    path = records_of(run, 0)
    path.write_bytes(path.read_bytes().replace(b'"schema":1', b'"schema":2,"more":3'))
    (missing,) = load(run).missing
    number = path.read_bytes().count(b"\n")
    assert (missing.line, missing.what.split(";")[0]) == (1, f"{number} records of a newer schema than 1")


def test_page_that_is_written_into_a_run_does_not_make_it_the_newest(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new")):
        (tmp_path / name / "records").mkdir(parents=True)
        (tmp_path / name / "job.json").touch()
        os.utime(tmp_path / name / "job.json", (1000 + number, 1000 + number))
    (tmp_path / "old" / "report.html").touch()
    os.utime(tmp_path / "old", (2000, 2000))
    assert [path.name for path in runs_in(tmp_path)] == ["new", "old"]


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b", "c")):
        (tmp_path / name / "records").mkdir(parents=True)
        os.utime(tmp_path / name, (1000 + number, 1000 + number))
    (tmp_path / "not-a-run").mkdir()
    assert [path.name for path in runs_in(tmp_path)] == ["c", "b", "a"]
    assert runs_in(tmp_path / "nowhere") == []


def test_run_that_is_deleted_while_runs_are_listed_costs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name / "records").mkdir(parents=True)

    def deleted(folder: Path) -> bool:
        was_run = is_run(folder)
        if folder.name == "b":
            shutil.rmtree(folder)
        return was_run

    monkeypatch.setattr("resilience.run_folder.load.is_run", deleted)
    assert sorted(path.name for path in runs_in(tmp_path)) == ["a", "c"]


@given(seed=st.integers(0, 10**6))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_no_damage_makes_the_report_fall_over(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    chance = random.Random(seed)
    folder = job([Fault("kill", 1, 0), Fault("hang", 2, 1, 20)]).write(tmp_path_factory.mktemp("damaged") / "run")
    for path in sorted(folder.glob("records/*")):
        content = bytearray(path.read_bytes())
        for _ in range(chance.randrange(6)):
            at = chance.randrange(len(content) + 1)
            match chance.randrange(4):
                case 0:
                    content[at : at + 1] = chance.randbytes(1)
                case 1:
                    del content[at : at + chance.randrange(2000)]
                case 2:
                    content[at:at] = chance.randbytes(chance.randrange(50))
                case 3:
                    content = content[: max(at, 1)]
        path.write_bytes(bytes(content))
        if chance.random() < 0.1:
            path.unlink()
    found = report(load(folder))
    assert msgspec.json.encode(as_json(found))
