"""Timings recorded by real runs become limits, and the limits hold in the next run."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.adapters import timeouts_file
from resilience.cli import main
from resilience.core import events
from tests.process.launching import Launched, launcher
from tests.support.ranks import Job

Launch = Callable[..., Launched]

TRAIN = """
import json, resilience
plan = json.loads((here / "plan.json").read_text())
for n in range(plan["steps"]):
    resilience.step(n)
    with resilience.section("train"):
        if (cycle, rank, n) == tuple(plan.get("hang", ())):
            time.sleep(600)
        time.sleep(0.001)
    if n % 100 == 99:
        with resilience.section("checkpoint"):
            time.sleep(0.3)
    resilience.heartbeat()
"""


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    return launcher(start, tmp_path)


def planned(folder: Path, **plan: object) -> None:
    (folder / "plan.json").write_text(json.dumps(plan))


def run_dir(name: str) -> dict[str, str]:
    return {"RESILIENCE_JOB_ID": name}


@pytest.mark.slow
def test_limits_learned_from_a_run_find_a_hang_and_leave_long_phases_alone(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(tmp_path, steps=3000)
    for name in ("first", "second"):
        assert launch(TRAIN, nproc=4, RESILIENCE_JOB_ID=name).wait(120.0) == [0]
    runs = tmp_path / "runs"
    out = runs / "second" / "timeouts.yaml"
    status = main(["calibrate", str(runs / "first"), str(runs / "second"), "--out", str(out), "--min-timeout", "0.2"])
    assert status in (0, 3)
    found = timeouts_file.read(out)
    train, checkpoint = found.deadlines["train"], found.deadlines["checkpoint"]
    assert train.n >= 5000 and train.ranks == 4
    assert 0.001 <= train.median_s < 0.1
    assert 0.3 <= checkpoint.median_s < 0.6
    capsys.readouterr()
    # The same configuration again, with a hang: found at the limit, while checkpoints go on untouched.
    planned(tmp_path, steps=1500, hang=[0, 2, 777])
    job = launch(TRAIN, nproc=4, RESILIENCE_JOB_ID="third", RESILIENCE_TIMEOUTS="auto")
    assert job.wait(120.0) == [0]
    (loaded,) = [record.event for record in job.of(events.TimeoutsLoaded)]
    assert loaded.is_same_configuration and loaded.source == str(out)
    silent = [record.event for record in job.of(events.RankFellSilent)]
    assert [event.limit for event in silent] in (["section:train"], ["heartbeat"])
    assert silent[0].allowed_s <= 5 * max(train.max_s, found.deadlines["heartbeat"].max_s)
    assert [record.event.outcome for record in job.of(events.CycleEnded)] == ["failed", "completed"]


def test_timings_survive_the_ranks_death_and_say_how_a_section_ended(launch: Launch, tmp_path: Path) -> None:
    planned(tmp_path, steps=50)
    script = TRAIN.replace(
        "if n % 100", "if n == 40 and rank == 1 and cycle == 0: os.kill(os.getpid(), 9)\n    if n % 100"
    )
    script = script.replace(
        "time.sleep(0.001)", "time.sleep(0.001)\n        if n == 40 and rank and not cycle: os.kill(os.getpid(), 9)"
    )
    assert launch(script).wait() == [0]
    lines = [json.loads(line) for line in (tmp_path / "runs/job/timings/node0-1.jsonl").read_text().splitlines()]
    values = [line for line in lines if line["kind"] == "value" and line["section"] == "train"]
    assert [value["i"] for value in values if value.get("end") == "cut"] == [40]
    assert len([line for line in lines if line["kind"] == "start"]) == 2
    assert {line["j"] for line in values} >= set(range(40))


def test_shadow_mode_tells_and_does_nothing(launch: Launch, tmp_path: Path) -> None:
    planned(tmp_path, steps=110)
    (tmp_path / "limits.yaml").write_text(
        "schema: 1\nfingerprint: 'table:x'\ncreated: now\ntarget_false_alarms: 1\nhorizon_s: 1.0\nranks: 2\n"
        "deadlines:\n  checkpoint: {timeout_s: 0.05, status: ok, reason: '', p: 0.1, max_s: 0.05, median_s: 0.01}\n"
    )
    limits = str(tmp_path / "limits.yaml")
    job = launch(TRAIN, "--timeouts", limits, "--timeouts-shadow")
    assert job.wait() == [0]
    alarms = [(record.origin.rank, record.event.limit) for record in job.of(events.TimeoutExceededInShadow)]
    assert sorted(alarms) == [(0, "section:checkpoint"), (1, "section:checkpoint")]
    assert job.of(events.RankFellSilent) == []
    acting = launch(TRAIN, "--timeouts", limits, "--max-restarts", "0", RESILIENCE_JOB_ID="acting")
    assert acting.wait() == [1]
    assert {record.event.limit for record in acting.of(events.RankFellSilent)} == {"section:checkpoint"}
    assert signal.SIGKILL  # the launcher's default for a rank past its limit


def test_auto_without_an_earlier_fit_says_so_and_goes_on(launch: Launch, tmp_path: Path) -> None:
    planned(tmp_path, steps=3)
    job = launch(TRAIN, "--timeouts", "auto")
    assert job.wait() == [0]
    (loaded,) = [record.event for record in job.of(events.TimeoutsLoaded)]
    assert loaded.deadlines == 0
    assert "no timeouts.yaml of this configuration" in job.output(stream=2)


def test_file_of_limits_that_is_none_ends_the_launcher_at_once(launch: Launch, tmp_path: Path) -> None:
    planned(tmp_path, steps=3)
    assert launch(TRAIN, "--timeouts", str(tmp_path / "plan.json")).wait() == [2]
