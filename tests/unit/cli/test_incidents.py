"""`resilience incidents`: the faults of many runs, each once."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import msgspec
import pytest

from resilience.attribution.culprits import SURE
from resilience.attribution.incident import Cost, Incident
from resilience.cli import main
from resilience.facts.identity import Job
from resilience.report.condensed import report
from resilience.report.fault_list import fault_lines
from resilience.report.page import _kinds
from resilience.report.repeats import KnownIncident, faults
from resilience.run_folder.load import load
from resilience.system.render import date
from resilience.telemetry.recording import write_job
from tests.support.launch_streams import Fault as LauncherFault
from tests.support.launch_streams import launched
from tests.support.record_streams import STARTED_NS, Fault, job

NODE = "node"
DAY_NS = 86_400 * 10**9


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("COLUMNS", "80")
    root = tmp_path / "runs"
    monkeypatch.setenv("RESILIENCE_RUN_DIR", str(root))
    job([Fault("exception", 1, 0, 13), Fault("kill", 2, 1, 20), Fault("exception", 3, 2, 30)]).write(root / "monday")
    job([Fault("exception", 0, 0, 7)]).write(root / "tuesday")
    return root


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert main(["incidents", *arguments, "--json"]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_incidents_of_all_runs_are_grouped_by_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """The same exception on three ranks, in three iterations and two runs is one fault."""
    found = {fault["what"]: fault for fault in told(capsys)}
    assert found.keys() == {"exception", "killed"}
    assert found["exception"]["count"] == 3
    assert found["exception"]["runs"] == {"monday": 2, "tuesday": 1}
    assert found["exception"]["ranks"] == {"0": 1, "1": 1, "3": 1}
    assert found["killed"]["runs"] == {"monday": 1}
    assert found["killed"]["nodes"] == {NODE: 1}
    assert float(str(found["exception"]["lost_s"])) > 0


def test_node_and_rank_are_counted_only_if_they_are_blamed_surely(runs: Path) -> None:
    (incident,) = report(load(runs / "tuesday")).incidents
    (culprit,) = incident.verdict.culprits
    for confidence, ranks, nodes in ((SURE, {0: 1}, {NODE: 1}), (SURE - 0.1, {}, {})):
        culprits = (msgspec.structs.replace(culprit, confidence=confidence),)
        verdict = msgspec.structs.replace(incident.verdict, culprits=culprits)
        (fault,) = faults([KnownIncident("run", msgspec.structs.replace(incident, verdict=verdict))])
        assert (fault.count, fault.ranks, fault.nodes) == (1, ranks, nodes)


def test_fault_has_the_same_fingerprint_as_in_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    marks = {fault["fingerprint"] for fault in told(capsys, "tuesday")}
    assert main(["report", "tuesday", "--json"]) == 0
    (incident,) = json.loads(capsys.readouterr().out)["incidents"]
    assert marks == {incident["fingerprint"]}


def test_text_says_in_which_run_a_fault_was_seen_before(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    assert main(["incidents", str(runs)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("4 incidents of 2 faults in 2 runs")
    assert "before in run" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(("earlier", "later"), [("a", "b"), ("b", "a")])
def test_fault_has_the_time_and_the_run_in_which_it_was_first_seen(
    earlier: str, later: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A day lies between the two runs. Their names are in either order."""
    root = tmp_path / "two"
    moments = []
    for name, day in ((later, 1), (earlier, 0)):
        run = job([Fault("exception", 1, 0, 13)], started_ns=STARTED_NS + day * DAY_NS)
        run.write(root / name)
        moments.append(incident_of(root / name).detected_wall_ns)
    (fault,) = told(capsys, str(root))
    assert (fault["first_run"], fault["last_ns"], fault["first_ns"]) == (earlier, *moments)
    assert main(["incidents", str(root)]) == 0
    text = capsys.readouterr().out
    assert f"before in run {earlier}, then in {later}" in text
    assert re.search(rf"{date(STARTED_NS)[:10]} .* to {date(STARTED_NS + DAY_NS)[:10]} ", text)


def incident_of(run: Path) -> Incident:
    (incident,) = report(load(run)).incidents
    return incident


def test_runs_with_the_same_name_in_different_folders_are_told_apart(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folders = [tmp_path / day / "job" for day in ("monday", "tuesday")]
    for folder in folders:
        job([Fault("exception", 1, 0, 13)]).write(folder)
    (fault,) = told(capsys, *map(str, folders))
    assert fault["runs"] == {str(folder): 1 for folder in folders}


def test_cause_of_a_fault_is_that_of_the_blamed_rank(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Only another rank, which waited for it, has a record."""
    job([Fault("waited_for", 1, 0)], world=4).write(tmp_path / "run")
    (fault,) = told(capsys, str(tmp_path / "run"))
    assert (fault["what"], fault["cause"]) == ("hung", "hanging")


@pytest.mark.parametrize("given", ["nothing", "folder", "relative and absolute", "link and name"])
def test_run_counts_once_by_whatever_names_it_is_found(
    given: str, capsys: pytest.CaptureFixture[str], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs / "latest").symlink_to("monday")
    monkeypatch.chdir(runs.parent)
    arguments = {
        "nothing": [],
        "folder": [str(runs)],
        "relative and absolute": ["runs/monday", str(runs / "monday"), "tuesday"],
        "link and name": ["runs/latest", "monday", "tuesday"],
    }[given]
    found = {fault["what"]: fault for fault in told(capsys, *arguments)}
    assert found["exception"]["runs"] == {"monday": 2, "tuesday": 1}
    assert main(["incidents", *arguments]) == 0
    assert "in 2 runs" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_run_with_incomplete_records_is_named(
    options: list[str], capsys: pytest.CaptureFixture[str], runs: Path
) -> None:
    assert write_job(Job("wednesday"), runs / "wednesday")
    (runs / "wednesday" / "records").touch()  # no folder, so it cannot be listed
    (runs / "tuesday" / "records" / "node-3.jsonl").unlink()
    assert main(["incidents", *options]) == 0
    lines = sorted(capsys.readouterr().err.splitlines())
    assert lines == [
        "tuesday is incomplete: records of rank 3 are missing",
        "wednesday is incomplete: records are missing",
    ]


def test_json_has_no_note_among_its_lines_if_stderr_is_closed(
    capsys: pytest.CaptureFixture[str], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs / "tuesday" / "records" / "node-3.jsonl").unlink()
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["incidents", "--json"]) == 0
    json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "attempts"),
    [("friday", ["friday", "friday@1", "friday@10"]), ("friday@0", ["friday"]), ("friday@1", ["friday@1"])],
)
def test_job_means_all_its_attempts_and_a_numbered_attempt_only_itself(
    name: str, attempts: list[str], capsys: pytest.CaptureFixture[str], runs: Path
) -> None:
    for attempt in ("friday", "friday@1", "friday@10"):
        job([Fault("kill", 2, 1, 20)]).write(runs / attempt)
    (fault,) = told(capsys, name)
    assert fault["runs"] == dict.fromkeys(attempts, 1)


def test_run_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["incidents", "sunday"]) == 2
    assert "sunday does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("signs", [True, False])
def test_cost_without_the_rework_of_an_incident_says_so(
    signs: bool, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched([LauncherFault("kill", 1)], signs=signs).write(runs / "friday")
    (fault,) = told(capsys, "friday")
    assert float(str(fault["lost_s"])) > 0
    assert fault["unknown_rework"] == int(not signs)
    assert main(["incidents", "friday"]) == 0
    assert ("rework of 1 incident unknown" in capsys.readouterr().out) is not signs


def test_unknown_cost_is_not_shown_as_zero(tmp_path: Path) -> None:
    runs = [job([Fault(kind, 1, 0)]).write(tmp_path / kind) for kind in ("kill", "raise")]
    incident, other = (report(load(run)).incidents[0] for run in runs)
    unknown = msgspec.structs.replace(other, cost=Cost())
    assert incident.cost.lost_s
    assert unknown.cost.lost_s is None
    found = faults([KnownIncident("run", incident), KnownIncident("run", unknown)])
    assert [fault.fingerprint for fault in found] == [incident.fingerprint, unknown.fingerprint]
    assert found[1].lost_s is None
    (line,) = [line for line in fault_lines(found, 2, 80, None) if line and line[0][0].startswith(unknown.fingerprint)]
    assert line[0][0].endswith("cost unknown")
    assert _kinds([unknown])[0]["lost_s"] is None
