"""The campaign through its command: a case is run, its truth is written before, and it is not run twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaign import running
from tests.campaign.cases import Case, to_json
from tests.campaign.contestants import Verdict
from tests.campaign.injector import truth_of
from tests.support.signs import await_file

KILL = Case(3, 7, "wrapper", 4, "sigkill", 2, 5, ("killed",))


class Fake:
    """A contestant whose job is a shell script. seen: the truth as it stood when the job was about to start."""

    name = "fake"
    gives_verdicts = False
    states_confidence = False

    def __init__(self, script: str) -> None:
        self.script, self.seen = script, ""

    def commands(self, case: Case, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
        self.seen = truth_of(folder).read_text()
        return [(["sh", "-c", self.script], {})]

    def verdict(self, folder: Path) -> Verdict:
        return Verdict()


def test_truth_is_written_before_the_job_starts(tmp_path: Path) -> None:
    fake = Fake("cat ../case.truth.json; echo right > result")
    outcome = running.run(KILL, fake, tmp_path / "case", "right\n")
    assert fake.seen == (tmp_path / "case" / "output").read_text() == to_json(KILL)
    assert (outcome.recovered, outcome.is_equal, outcome.is_wedged, outcome.orphans) == (True, True, False, 0)


def test_job_that_wedges_is_ended_with_all_processes_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, await_end = tmp_path / "case", running._await

    def await_child_and_end(processes: list[subprocess.Popen[bytes]], deadline: float) -> bool:
        await_file(folder / "child", 120.0)
        assert int((folder / "child").read_text()) in {process.pid for process in running._left(f"{os.getpid()}-")}
        return await_end(processes, deadline)

    monkeypatch.setattr(running, "LIMIT_S", 1.0)
    monkeypatch.setattr(running, "_await", await_child_and_end)
    outcome = running.run(KILL, Fake("setsid sleep 600 & echo $! > new; mv new child; sleep 600"), folder)
    assert (outcome.is_wedged, outcome.recovered) == (True, False)
    assert list(running._left(f"{os.getpid()}-")) == []


def campaign(out: Path, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.campaign", "--cases", "1", "--worlds", "2", "--out", str(out), *options],
        capture_output=True,
        timeout=240,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
def test_case_is_run_once_and_scored(tmp_path: Path) -> None:
    assert "[####################] 1/1 ok" in campaign(tmp_path)
    (line,) = (tmp_path / "results.jsonl").read_text().splitlines()
    outcome = json.loads(line)
    assert (outcome["recovered"], outcome["is_equal"], outcome["orphans"]) == (True, True, 0)
    told = campaign(tmp_path, "--resume")
    assert "1 of them done" in told and "1/1" not in told
    assert (tmp_path / "results.jsonl").read_text().splitlines() == [line]
