"""`resilience report`: 80 columns, readable at first sight, helpful where it cannot do what was asked."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from resilience.attribution.culprits import Culprit
from resilience.attribution.incident import Phase, Spread
from resilience.attribution.symptoms import Class
from resilience.cli import VERBS, main
from resilience.facts import events
from resilience.facts.in_words import seconds
from resilience.facts.interruptions import Exit, FaultOrigin, Frame, Interruption, InterruptionRecord
from resilience.facts.records import Record
from resilience.report.condensed import report
from resilience.report.page import ReportPage
from resilience.report.terminal import incident_lines, incident_table, report_lines
from resilience.run_folder.load import load
from resilience.system.render import cut, painted, plain, show, table, wrap
from tests.support import launch_streams
from tests.support.nested_streams import call_another_before, nested
from tests.support.record_streams import Fault, Job, Kind, LateHang, job

WIDTH = 80


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("RESILIENCE_RUN_DIR", str(tmp_path / "runs"))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    def made(name: str, faults: list[Fault], **options: int) -> Path:
        return job(faults, **options).write(tmp_path / "runs" / name)  # type: ignore[arg-type]

    return made


def lines_of(folder: Path, width: int = WIDTH, now_ns: int = 0) -> list[str]:
    return [plain(line) for line in report_lines(report(load(folder)), width, now_ns)]


# -- what it shows -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_line_fits(make: Callable[..., Path], kind: Kind, width: int) -> None:
    folder = make("run", [Fault(kind, 1, 0, 13), Fault("exception", 2, 1, 20)], spares=1)
    lines = lines_of(folder, width)
    assert len(lines) > 20
    assert max(len(line) for line in lines) <= width


def test_long_name_of_a_job_is_cut(tmp_path: Path) -> None:
    folder = job([Fault("kill", 1, 0)], job_id="j" * 120).write(tmp_path / "run")
    lines = lines_of(folder, WIDTH)
    assert max(len(line) for line in lines) <= WIDTH
    assert lines[0].startswith("Run jjjjjj")


@pytest.mark.parametrize("kind", get_args(launch_streams.Kind))
@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_line_of_a_launched_job_fits(kind: launch_streams.Kind, width: int, tmp_path: Path) -> None:
    faults = [launch_streams.Fault("raise", 3), launch_streams.Fault(kind, 2)]
    folder = launch_streams.launched(faults, nodes=2).write(tmp_path / "runs" / "launched")
    assert max(len(line) for line in lines_of(folder, width)) <= width


def test_report_of_a_run_without_an_end_says_until_when_it_reaches(tmp_path: Path) -> None:
    running = launch_streams.launched(is_running=True)
    last_ns = max(record.wall_ns for record in running.records)
    folder = running.write(tmp_path / "runs" / "running")
    at = time.strftime("%H:%M:%S", time.gmtime(last_ns / 1e9))
    lines = lines_of(folder, now_ns=last_ns + 37 * 10**9)
    assert lines[1].split() == ["as", "of", at, "UTC,", "37", "s", "ago", "(the", "last", "record)"]
    page = ReportPage(folder).page()
    assert f"As of {at} UTC, " in page
    ended = launch_streams.launched().write(tmp_path / "runs" / "ended")
    assert not [line for line in lines_of(ended, now_ns=last_ns) if "as of" in line]
    assert "As of" not in ReportPage(ended).page()


def test_json_says_whether_the_end_is_on_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for is_running in (True, False):
        folder = launch_streams.launched(is_running=is_running).write(tmp_path / "runs" / str(is_running))
        assert main(["report", str(folder), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["is_ended"] is not is_running and found["last_wall_ns"] > 0


def test_cycle_tells_its_legs_and_where_the_time_went(tmp_path: Path) -> None:
    told = launch_streams.launched([launch_streams.Fault("hang", 2)], nodes=2)
    text = "\n".join(lines_of(told.write(tmp_path / "runs" / "launched")))
    for part in (
        "4 ranks on 2 nodes: node0, node1",
        "records cover 9.36 s, 2 cycles",
        "completed on ranks 0-3; the launcher: completed, exit status 0",
        "% of 9.36 s productive",
        "lost: start-up 660 ms, restarts 695",
        "1  Hang, killed on rank 2  cycle 0, step 40",
        "verdict    rank 2: waiting for input (storage)",
        "rendezvous      200 ms    200 ms  node0",
        "script start    400 ms    400 ms  rank 0",
        "2.01 s silence, 700 ms restart, 10 steps done again",
        "ranks 0-1, 3 stopped; started again (warm):",
    ):
        assert part in text
    assert "% with a limit of 1 s, if no healthy rank is ever silent for that long" in unwrapped(text)


def test_rework_is_unknown_if_no_step_after_the_restart_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = launch_streams.launched([launch_streams.Fault("kill", 1)])
    for key, records in told.files.items():
        told.files[key] = [
            record
            for record in records
            if not (record.origin.cycle == 1 and isinstance(record.event, events.WorkerProgressed))
        ]
    run = str(told.write(tmp_path / "runs" / "launched"))
    assert main(["report", run, "--incident", "1"]) == 0
    text = unwrapped(capsys.readouterr().out)
    assert "rework unknown: the step before or after the restart is not on record" in text


def test_rework_is_unknown_if_several_wrapped_functions_ran_before_the_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = nested([launch_streams.Fault("kill", 1)], has_steps=True)
    call_another_before(told, 0)
    run = str(told.write(tmp_path / "runs" / "nested"))
    assert main(["report", run, "--incident", "1"]) == 0
    text = unwrapped(capsys.readouterr().out)
    assert "rework unknown: several wrapped functions were called before the restart" in text
    assert main(["report", run, "--json"]) == 0
    (incident,) = json.loads(capsys.readouterr().out)["incidents"]
    assert incident["cost"]["has_several_functions"]


@pytest.mark.parametrize("signs", [True, False])
def test_rework_is_said_to_be_unknown_where_no_step_is_reported(
    signs: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = launch_streams.launched([launch_streams.Fault("kill", 1)], signs=signs)
    run = str(told.write(tmp_path / "runs" / "launched"))
    for options, times in (([], 2), (["--incident", "1"], 0)):  # of the time and of all incidents
        assert main(["report", run, *options]) == 0
        text = unwrapped(capsys.readouterr().out)
        assert ("rework unknown: no step reported" in text) is not signs
        assert text.count("rework of 1 incident unknown") == times * (not signs)
    assert main(["report", run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (incident,) = found["incidents"]
    assert ("lost_steps" in incident["cost"], "rework_s" in incident["cost"]) == (signs, signs)
    assert (found["lost_steps"] is None) is not signs
    assert (found["times"]["rework_s"] is None) is not signs
    assert (found["unknown_cost"], found["unknown_rework"]) == (0, int(not signs))
    page = tmp_path / "report.html"
    assert main(["report", run, "--html", str(page)]) == 0
    assert ("rework unknown: no step reported" in unwrapped(page.read_text())) is not signs
    assert ("Repeated steps of 1 incident unknown" in page.read_text()) is not signs
    assert ('repeated steps</td><td class="n">unknown</td>' in page.read_text()) is not signs


def test_restarts_of_the_job_come_before_those_of_its_ranks(make: Callable[..., Path], tmp_path: Path) -> None:
    text = unwrapped(" ".join(lines_of(make("run", [Fault("exception", 1, iteration, 13) for iteration in range(2)]))))
    assert re.search(r"restarts +2 in place \(8 rank restarts, median [\d.]+ m?s, 95 % within [\d.]+ m?s\)", text)
    folder = launch_streams.launched([launch_streams.Fault("kill", 1)]).write(tmp_path / "runs" / "launched")
    assert re.search(r"restarts +1 by the launcher \(\d rank restarts, ", unwrapped(" ".join(lines_of(folder))))


def test_productive_share_is_an_upper_bound_if_rework_is_unknown(make: Callable[..., Path]) -> None:
    condensed = report(load(make("run", [Fault("hang", 1, 0, 13)])))
    assert condensed.what_ifs
    shares = []
    for unknown in (0, 1):
        changed = msgspec.structs.replace(condensed, unknown_rework=unknown)
        text = unwrapped(" ".join(plain(line) for line in report_lines(changed, WIDTH, 0)))
        shares.append(re.findall(r"(at most )?\d+\.\d % (?:of|with)", text))
    assert shares[0] and not any(shares[0]) and all(shares[1])


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_exception_without_a_message_is_its_type_and_repeats_are_counted(make: Callable[..., Path]) -> None:
    incident = report(load(make("run", [Fault("exception", 1, 0)]))).incidents[0]
    error = msgspec.structs.replace(incident.records[0].exception, type="MemoryError", message="")
    record = msgspec.structs.replace(incident.records[0], exception=error)
    incident = msgspec.structs.replace(incident, records=(record,), same_as=(1, 2))
    lines = [plain(line) for line in incident_lines(incident, WIDTH)]
    assert "   what       MemoryError" in lines
    assert "   repeats    the same failure as incidents 1, 2" in lines


def test_long_series_of_the_same_failure_shows_its_first_and_last_and_counts_the_rest(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make("run", [Fault("exception", 1, iteration, 13) for iteration in range(40)] + [Fault("kill", 0, 40, 20)])
    lines = lines_of(folder)
    numbers = [line.split()[0] for line in lines if re.match(r"\d+  \S", line)]
    assert numbers == ["1", "40", "41"]
    assert "…          38 more of the same failure; --incident N shows one, --json all" in lines
    begin = lines.index("") + 1
    assert [line.split()[0] for line in lines[begin : begin + 5]] == ["#", "1", "…", "40", "41"]
    assert "   repeats    the same failure as 39 incidents from 1 to 39" in lines
    assert main(["report", str(folder), "--incident", "20"]) == 0
    assert "20  Exception on rank 1" in capsys.readouterr().out
    assert main(["report", str(folder), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["incidents"]) == 41


def test_short_series_of_the_same_failure_is_shown_as_a_whole(make: Callable[..., Path]) -> None:
    folder = make("run", [Fault("exception", 1, iteration, 13) for iteration in range(4)])
    assert [line[0] for line in lines_of(folder) if re.match(r"\d+  \S", line)] == ["1", "2", "3", "4"]


def test_long_times_of_a_phase_do_not_run_together(make: Callable[..., Path]) -> None:
    found = report(load(make("run", [Fault("exception", 1, 0)])))
    phase = Phase("resume", Spread(30.5, 90.0, 2, 4))
    incident = msgspec.structs.replace(found.incidents[0], phases=(phase,))
    lines = [plain(line) for line in incident_lines(incident, WIDTH)]
    assert any("30.5 s 1 min 30 s  rank 2" in line for line in lines)


@pytest.mark.parametrize("world", [4, 300])
def test_length_does_not_grow_with_the_world(make: Callable[..., Path], world: int) -> None:
    lines = lines_of(make("run", [Fault("kill", 1, 0)], world=world))
    assert len(lines) < 50
    assert max(len(line) for line in lines) <= WIDTH


def test_one_screen_tells_what_where_since_when_and_what_it_cost(make: Callable[..., Path]) -> None:
    folder = make("run", [Fault("exception", 1, 0, 10), Fault("kill", 2, 1, 23)], spares=1)
    text = "\n".join(lines_of(folder))
    for part in (
        "Run job  train.main",
        "5 ranks on 1 node: node",
        "resilience 0.1.0, torch 2.13.0, Python 3.11.7",
        "completed on ranks 0-1, 3-4; rank 2 lost",
        "1  22:13:21  exception     rank 1  data.py:34",
        "2  22:13:22  process died  rank 2",
        "1  Exception on rank 1  iteration 0, step 10",
        "what       ValueError: bad batch",
        "at /home/me/data.py:34 in next_batch",
        "where      rank 1, node node, pid 101",
        "verdict    rank 1: raised an exception (user code); confidence 0.9",
        "2  Process died on rank 2  iteration 1, step 23",
        "its process ended: SIGKILL",
        "3 steps done again",
        "rank 2 excluded; rank 4 stepped in",
        "next       find out who sent SIGKILL",
        "job.json: does not exist",
    ):
        assert part in text


def test_hang_shows_limit_section_silence_and_the_line_where_it_waits(make: Callable[..., Path]) -> None:
    (incident,) = report(load(make("run", [Fault("hang", 1, 0)]))).incidents
    text = "\n".join(plain(line) for line in incident_lines(incident, WIDTH))
    assert "no Python code run by the main thread for 3.01 s, limit 3 s" in text
    assert "at /home/me/data.py:34 in next_batch" in text
    assert "section data open 3 s" in text
    assert "stack      me/data.py:34 next_batch" in text
    assert "inprocess/_runtime/call.py" not in text


@pytest.mark.parametrize(("what", "title"), [("agent_lost", "Agent lost: node"), ("node_lost", "Node lost: node")])
def test_lost_host_is_named_in_the_title_and_not_one_of_its_ranks(
    make: Callable[..., Path], what: str, title: str
) -> None:
    condensed = report(load(make("run", [Fault("exception", 1, 0)])))
    (incident,) = condensed.incidents
    verdict = msgspec.structs.replace(incident.verdict, what=what)
    lost = msgspec.structs.replace(incident, kind="unresponsive", verdict=verdict)
    text = "\n".join(plain(line) for line in incident_lines(lost, WIDTH))
    assert text.startswith(f"1  {title} ")
    table = [plain(line) for line in incident_table((lost,), WIDTH)]
    assert f"{what.replace('_', ' ')}  node " in table[-1]
    named = msgspec.structs.replace(lost, verdict=msgspec.structs.replace(verdict, what="unknown"))
    assert "Unresponsive" in "\n".join(plain(line) for line in incident_lines(named, WIDTH))


def test_node_of_a_survivor_that_was_interrupted_too_is_not_called_lost(make: Callable[..., Path]) -> None:
    (incident,) = report(load(make("run", [Fault("exception", 1, 0)]))).incidents
    survivor = msgspec.structs.replace(incident.records[0], rank=0, node="other")
    lost = msgspec.structs.replace(
        incident,
        kind="unresponsive",
        verdict=msgspec.structs.replace(incident.verdict, what="node_lost"),
        records=(*incident.records, survivor),
    )
    assert plain(next(incident_lines(lost, WIDTH))).startswith("1  Node lost: node  ")
    assert "other" not in plain(incident_table((lost,), WIDTH)[-1])


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("starting", "before its program began"),
        ("ending", "while its program ended"),
        ("outside", "outside of the wrapped function"),
        ("finalize", "in finalize"),
    ],
)
def test_report_says_in_words_what_a_rank_was_doing(make: Callable[..., Path], stage: str, words: str) -> None:
    (incident,) = report(load(make("run", [Fault("exception", 1, 0)]))).incidents
    records = tuple(msgspec.structs.replace(record, stage=stage) for record in incident.records)
    changed = msgspec.structs.replace(incident, records=records)
    text = unwrapped("\n".join(plain(line) for line in incident_lines(changed, WIDTH)))
    assert f"pid 101, {words}" in text


def test_last_progress_counts_back_from_the_same_detection_as_the_silence(make: Callable[..., Path]) -> None:
    """A later limit ended the rank, so its record comes first. The report says when the first limit fired."""
    (incident,) = report(load(make("run", [Fault("hang", 1, 0)]))).incidents
    soft, *rest = incident.records
    assert soft.detected_wall_ns is not None
    soft = msgspec.structs.replace(soft, last_heartbeat_age_s=2.6)
    later_ns = soft.detected_wall_ns + 2 * 10**9
    hard = msgspec.structs.replace(
        soft,
        interruption=Interruption.HARD_TIMEOUT,
        detected_wall_ns=later_ns,
        silent_for_s=5.01,
        last_heartbeat_age_s=4.6,
    )
    killed = msgspec.structs.replace(incident, records=(hard, soft, *rest))
    text = unwrapped("\n".join(plain(line) for line in incident_lines(killed, WIDTH)))
    assert "detected 3.01 s later; last sign of progress 2.6 s before detection" in text


def test_who_was_waited_for_is_named_though_another_rank_reported(make: Callable[..., Path]) -> None:
    (incident,) = report(load(make("run", [Fault("waited_for", 2, 0)]))).incidents
    text = "\n".join(plain(line) for line in incident_lines(incident, WIDTH))
    assert "Hang on rank 2" in text
    assert "rank 0: no Python code run by the main thread for" in text
    assert "rank 2 was at /home/me/data.py:34 in next_batch" in text
    assert "rank 0 reported first, but its failure is a consequence" in text


def test_hung_rank_without_a_stack_shows_where_it_was_stopped(make: Callable[..., Path], tmp_path: Path) -> None:
    told = job([Fault("hang", 1, 0)])
    for rank, records in told.files.items():
        told.files[rank] = [without_stack(record) for record in records]
    folder = told.write(tmp_path / "runs" / "unanswered")
    (row,) = [line for line in lines_of(folder) if line.startswith("  1  ")]
    assert "data.py:34" in row
    text = unwrapped(" ".join(lines_of(folder)))
    assert "limit 3 s stopped at /home/me/data.py:34 in next_batch where rank 1" in text
    answered = unwrapped(" ".join(lines_of(make("answered", [Fault("hang", 1, 0)]))))
    assert "limit 3 s at /home/me/data.py:34 in next_batch where rank 1" in answered


def test_hung_rank_whose_stack_was_taken_late_shows_where_it_was_stopped(make: Callable[..., Path]) -> None:
    (incident,) = report(load(make("run", [Fault("hang", 1, 0)]))).incidents
    changed = msgspec.structs.replace(incident, where=Frame("/home/me/model.py", 7, "forward"))
    text = unwrapped(" ".join(plain(line) for line in incident_lines(changed, WIDTH)))
    assert "limit 3 s stopped at /home/me/model.py:7 in forward where rank 1" in text


def without_stack(record: Record) -> Record:
    """A hung rank's thread did not answer when its stack was asked for."""
    if not isinstance(record.event, events.RankInterrupted):
        return record
    unanswered = msgspec.structs.replace(
        record.event.record, stacks=(), stack_method="none: the asked thread did not answer within 0.3 s"
    )
    return msgspec.structs.replace(record, event=msgspec.structs.replace(record.event, record=unanswered))


def test_rank_that_only_reported_a_hang_is_not_called_the_one_that_failed(make: Callable[..., Path]) -> None:
    folder = make("run", [Fault("communication", 1, 0)])
    text = "\n".join(lines_of(folder))
    assert "Hang, reported by rank 1" in text and "on rank 1" not in text
    (row,) = [line for line in lines_of(folder) if line.startswith("  1  ")]
    assert " none " in row and "rank 1" not in row


def test_error_is_said_to_be_of_the_rank_that_raised_it_though_another_one_is_blamed(make: Callable[..., Path]) -> None:
    (incident,) = report(load(make("run", [Fault("exception", 1, 0)]))).incidents
    verdict = msgspec.structs.replace(incident.verdict, first=0, culprits=(Culprit(0, "went_on", 0.6, 7),))
    lines = incident_lines(msgspec.structs.replace(incident, verdict=verdict), WIDTH)
    text = "\n".join(plain(line) for line in lines)
    assert "Exception on rank 1" in text
    assert "rank 0: continued while others waited" in text


def test_unsure_verdict_names_the_rules_that_could_not_run(make: Callable[..., Path]) -> None:
    (incident,) = report(load(make("run", [Fault("communication", 1, 0)]))).incidents
    text = "\n".join(plain(line) for line in incident_lines(incident, WIDTH))
    assert "rule 10 wait-for walk: lacks the collectives that" in text
    (sure,) = report(load(make("sure", [Fault("kill", 1, 0)]))).incidents
    assert "blind" not in "\n".join(plain(line) for line in incident_lines(sure, WIDTH))


def test_candidate_is_listed_and_not_called_a_consequence(make: Callable[..., Path]) -> None:
    (incident,) = report(load(make("run", [Fault("waited_for", 2, 0)]))).incidents
    verdict = incident.verdict
    candidate = Culprit(incident.reported_first or 0, "exited", 0.4, 1)
    beside = msgspec.structs.replace(verdict, candidates=(candidate,))
    alone = msgspec.structs.replace(beside, culprits=(), what="unknown")
    for changed, words in ((beside, "candidates: rank 0"), (alone, "unknown; candidates: rank 0")):
        lines = incident_lines(msgspec.structs.replace(incident, verdict=changed), WIDTH)
        text = " ".join("\n".join(plain(line) for line in lines).split())
        assert f"{words} (confidence below 0.5)" in text
        assert "but its failure is a consequence" not in text
        assert ("rank 2: hanging" in text) is (changed is beside)


def verdict_of(culprits: tuple[Culprit, ...], what: Class, make: Callable[..., Path]) -> str:
    """Return what the report says of culprits, the first of whom comes first; rank 0 reported first."""
    (incident,) = report(load(make("run", [Fault("exception", 0, 0)]))).incidents
    first = culprits[0].rank
    verdict = msgspec.structs.replace(incident.verdict, what=what, first=first, culprits=culprits, exonerated=())
    assert incident.reported_first == 0
    return unwrapped(
        "\n".join(plain(line) for line in incident_lines(msgspec.structs.replace(incident, verdict=verdict), WIDTH))
    )


def test_second_culprit_that_reported_first_is_not_called_a_consequence(make: Callable[..., Path]) -> None:
    """Rank 1 hung before rank 0 was killed."""
    text = verdict_of((Culprit(1, "waits_for_lock", 0.8, 11), Culprit(0, "killed", 0.95, 1)), "waits_for_lock", make)
    assert "rank 1: " in text and "rank 0: " in text
    assert "is a consequence" not in text


def test_each_culprit_of_a_class_has_its_own_confidence_and_rule(make: Callable[..., Path]) -> None:
    text = verdict_of(
        (Culprit(1, "hung", 0.9, 7), Culprit(0, "hung", 0.6, 11), Culprit(2, "hung", 0.9, 7)), "hung", make
    )
    assert "ranks 1-2: " in text
    sure, unsure = text.index("confidence 0.9, rule 7"), text.index("confidence 0.6, rule 11")
    assert sure < unsure < text.index("confidence below 0.9: too low to exclude a node or to count against a rank")


def test_sure_verdict_is_not_said_to_be_too_weak(make: Callable[..., Path]) -> None:
    assert "too low to exclude" not in verdict_of((Culprit(1, "hung", 0.9, 7),), "hung", make)


@pytest.mark.parametrize(
    ("origin", "counts"),
    [
        ("own", "too low to exclude a node, but FaultCounter counts the exception against ranks 0-3"),
        (None, "too low to exclude a node or to count against a rank"),  # no Wrapper, so no FaultCounter
    ],
)
def test_report_says_whether_an_exception_that_most_ranks_raise_counts_against_them(
    origin: FaultOrigin | None, counts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    everywhere = job([Fault("everywhere", 0, 0)])
    change_interruptions(everywhere, lambda record: msgspec.structs.replace(record, origin=origin))
    assert main(["report", str(everywhere.write(tmp_path / "runs" / "run"))]) == 0
    text = unwrapped(capsys.readouterr().out)
    assert "common cause" in text and "confidence 0.5, rule 14 common mode" in text
    assert f"confidence below 0.9: {counts}" in text
    assert text.count("confidence below 0.9") == 1


@pytest.mark.parametrize(
    ("silent_s", "blamed"),
    [
        (60.0, [(0, "told_to_stop"), (1, "waits_for_lock")]),  # its last sign of life came 50 s after the end
        (105.0, [(0, "told_to_stop")]),  # 5 s after it
    ],
)
def test_rank_that_lived_long_after_another_ones_end_is_blamed_for_its_hang_too(
    silent_s: float, blamed: list[tuple[int, str]], make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make("run", [Fault("term", 0, 0, late=LateHang(1, after_s=110.0, silent_s=silent_s))])
    assert main(["report", str(folder), "--json"]) == 0
    (incident,) = json.loads(capsys.readouterr().out)["incidents"]
    verdict = incident["verdict"]
    assert [(culprit["rank"], culprit["what"]) for culprit in verdict["culprits"]] == blamed
    assert (verdict["first"], 11 in verdict["rules_fired"]) == (0, len(blamed) == 2)


@pytest.mark.parametrize("is_launched", [False, True])
@pytest.mark.parametrize(("code", "is_told"), [(137, True), (1, False)])
def test_exit_status_137_may_stand_for_a_kill(
    code: int, is_told: bool, is_launched: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ending = launched_worker_exits_with(code) if is_launched else exits_with(code)
    assert main(["report", str(ending.write(tmp_path / "runs" / "run"))]) == 0
    text = unwrapped(capsys.readouterr().out)
    assert f"its process ended: exit code {code}" in text
    assert ("exit status 137 may stand for SIGKILL" in text) is is_told
    assert ("compare the memory with the container's limit" in text) is is_told
    assert "out of memory" not in text


def exits_with(code: int) -> Job:
    """Return a job one rank of which ends with this exit status."""

    def changed(record: InterruptionRecord) -> InterruptionRecord:
        return record if record.exit is None else msgspec.structs.replace(record, exit=Exit(code=code))

    told = job([Fault("exit", 1, 0)])
    change_interruptions(told, changed)
    return told


def launched_worker_exits_with(code: int) -> launch_streams.Launched:
    """Return a job of the launcher one worker of which ends with this exit status."""

    def changed(record: InterruptionRecord) -> InterruptionRecord:
        return record if record.exit is None else msgspec.structs.replace(record, exit=Exit(code=code))

    told = launch_streams.launched([launch_streams.Fault("kill", 1)])
    change_interruptions(told, changed)
    for records in told.files.values():
        for number, record in enumerate(records):
            match record.event:
                case events.WorkerExited(signal="SIGKILL") | events.RankExited(signal="SIGKILL"):
                    event = msgspec.structs.replace(record.event, code=code, signal=None)
                    records[number] = msgspec.structs.replace(record, event=event)
    return told


def change_interruptions(
    told: Job | launch_streams.Launched, changed: Callable[[InterruptionRecord], InterruptionRecord]
) -> None:
    """Replace the records of interruptions in a job by changed ones."""
    for records in told.files.values():
        for number, record in enumerate(records):
            if isinstance(record.event, events.RankInterrupted):
                event = events.RankInterrupted(changed(record.event.record))
                records[number] = msgspec.structs.replace(record, event=event)


def test_every_class_has_words() -> None:
    from resilience.attribution.symptoms import CLASSES

    assert set(CLASSES) == set(get_args(Class))


# -- the command -------------------------------------------------------------------------------


def test_monitor_that_the_launcher_lost_is_an_incident_beside_a_later_hang_of_another_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = launch_streams.launched([launch_streams.Fault("hang", 1)], ranks=3, lost_monitors=[(0, 2)])
    folder = str(told.write(tmp_path / "runs" / "run"))
    assert main(["report", folder, "--json"]) == 0
    lost, hung = json.loads(capsys.readouterr().out)["incidents"]
    named = [[(each["rank"], each["what"]) for each in one["verdict"]["culprits"]] for one in (lost, hung)]
    assert named == [[(2, "monitor_lost")], [(1, "input_stall")]]
    assert (lost["status"], lost["cost"]["lost_s"], lost.get("phases", [])) == ("continued", 0.0, [])
    assert main(["report", folder, "--incident", "1"]) == 0
    text = unwrapped(capsys.readouterr().out)
    assert "rank 2: lost the monitor (host)" in text
    assert "cost none: no rank was interrupted" in text
    assert "done another monitor watches rank 2" in text
    assert "next nothing, unless it happens again" in text


def test_newest_run_is_the_default(make: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(("old", "new")):
        folder = make(name, [Fault("kill", number + 1, 0)])
        for path in (folder, folder / "job.json"):
            if path.exists():
                os.utime(path, (1000 + number, 1000 + number))
    assert main(["report"]) == 0
    assert "Process died on rank 2" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["path", "name", "parent"])
def test_run_is_found_by_path_by_name_and_as_the_only_one_of_a_folder(
    how: str, make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make("mine", [Fault("kill", 1, 0)])
    assert main(["report", {"path": str(folder), "name": "mine", "parent": str(folder.parent)}[how]]) == 0
    assert "Process died on rank 1" in capsys.readouterr().out


def test_json_is_one_object(make: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    make("mine", [Fault("kill", 1, 0), Fault("exception", 2, 1, 20)])
    assert main(["report", "mine", "--json"]) == 0
    plain_report = json.loads(capsys.readouterr().out)
    assert [incident["kind"] for incident in plain_report["incidents"]] == ["terminated", "exception"]
    assert main(["report", "mine", "--json", "--incident", "2"]) == 0
    assert [incident["number"] for incident in json.loads(capsys.readouterr().out)["incidents"]] == [2]


def test_one_incident_can_be_shown_alone(make: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    make("mine", [Fault("kill", 1, 0), Fault("exception", 2, 1, 20)])
    assert main(["report", "mine", "--incident", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("2  Exception on rank 2")
    assert "Run job" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "nowhere"], "nowhere does not exist; runs in .*:\n  .*/mine"),
        (["report", "."], "is not a run folder: it has no records/; runs in"),
        (["report", "mine", "--incident", "3"], "--incident 3: .* has one incident, number 1"),
        (["reprot"], "unknown command 'reprot'; did you mean 'report'\\? The commands are: run, .*completion"),
        (["xyz"], "unknown command 'xyz'; the commands are: .*report"),
    ],
)
def test_wrong_use_ends_with_2_and_says_what_there_is(
    arguments: list[str],
    message: str,
    make: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    make("mine", [Fault("kill", 1, 0)])
    assert main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)


def test_folder_with_several_runs_lists_them(make: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folders = [make(name, []) for name in "abcdefghijk"]
    assert main(["report", str(folders[0].parent)]) == 2
    text = capsys.readouterr().err
    assert "contains 11 runs; name one of them" in text
    assert text.endswith("… and 3 more\n")


def test_no_run_at_all_says_where_it_looked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["report"]) == 2
    assert f"there are no runs in {tmp_path / 'runs'}" in capsys.readouterr().err
    assert main(["report", "x"]) == 2
    assert "RESILIENCE_RUN_DIR" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {verb} " in text for verb in VERBS)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert main([]) == 2
    assert main(["--version"]) == 0


def test_reader_that_has_seen_enough_causes_no_traceback(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    make("mine", [Fault("kill", 1, 0)])
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as gone:
        monkeypatch.setattr("sys.stdout", gone)
        assert main(["report", "mine"]) == 128 + signal.SIGPIPE
        monkeypatch.undo()


# -- how it looks ------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    line = (("bad", "bold red"), (" plain", ""))
    terminal, file = Terminal(), io.StringIO()
    show([line], terminal)
    show([line], file)
    assert terminal.getvalue() == "\x1b[1;31mbad\x1b[0m plain\n"
    assert file.getvalue() == "bad plain\n"
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    show([line], terminal)
    assert terminal.getvalue() == "bad plain\n"
    assert painted(line, False) == "bad plain"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "?"),
        (0.0, "0 ms"),
        (0.0002, "0.2 ms"),
        (0.004, "4 ms"),
        (0.0213, "21 ms"),
        (0.0997, "100 ms"),
        (0.5, "500 ms"),
        (0.9999, "1 s"),
        (3.014, "3.01 s"),
        (59.9, "59.9 s"),
        (59.97, "1 min 00 s"),
        (125.0, "2 min 05 s"),
        (12_000.0, "3 h 20 min"),
    ],
)
def test_durations_are_worded_as_a_person_would(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_text_is_wrapped_and_never_lost() -> None:
    text = "a path /" + "x" * 100 + " and the rest\nsecond line"
    assert "".join(wrap(text, 20)).replace(" ", "") == text.replace(" ", "").replace("\n", "")
    assert all(len(line) <= 20 for line in wrap(text, 20))


def test_table_gives_way_in_its_wide_column() -> None:
    lines = [plain(line) for line in table(("a", "b"), [("1", "x" * 100)], 30, wide=1)]
    assert max(map(len, lines)) <= 30
    assert lines[1].endswith("…")
    assert cut("abc", 3) == "abc"


def test_table_shortens_the_next_columns_if_the_wide_one_is_not_enough() -> None:
    ranks = "ranks 1024-1026, 1031, … and 3 more"
    row = ("1", "2026-11-23 04:26:24", "hang, killed", ranks, "data, train.py:24", "12 min 05 s", "310")
    lines = [
        plain(line) for line in table(("#", "since", "kind", "first", "where", "cost", "steps"), [row], 80, 4, 3, 2)
    ]
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("  1  2026-11-23 04:26:24  hang, killed  ranks ")
    assert "12 min 05 s" in lines[1] and lines[1].endswith("310")


def test_names_that_differ_stay_different_in_a_table_that_is_too_narrow() -> None:
    names = ("out_of_section.first", "out_of_section.first.iteration", "out_of_section.first.cycle")
    _, *rows = [plain(line) for line in table(("deadline", "max"), [(name, "1.2 s" * 4) for name in names], 42, 0)]
    shown = [row.split()[0] for row in rows]
    assert len(set(shown)) == 3 and shown[1].startswith("out_of") and shown[1].endswith("ation")
    assert max(map(len, rows)) <= 42


def test_narrow_column_is_not_widened_in_a_table_that_does_not_fit() -> None:
    lines = [plain(line) for line in table(("a", "b"), [("1", "x" * 100)], 40, 0, 1)]
    assert lines == ["  a  b", f"  1  {'x' * 34}…"]
