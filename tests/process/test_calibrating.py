"""Timings recorded by real runs become limits, and the limits hold in the next run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from resilience.calibration.limits_file import Deadline, Timeouts
from resilience.cli import main
from resilience.facts import events
from resilience.facts.interruptions import Interruption
from resilience.facts.limits import Rule
from resilience.report.condensed import report
from resilience.run_folder.load import load
from resilience.system import timeouts_file
from resilience.trace.export import spans_of
from tests.process.launching import Launched, launcher
from tests.support.account import Account
from tests.support.ranks import Job

Launch = Callable[..., Launched]

TRAIN = """
import json, resilience
plan = json.loads((here / "plan.json").read_text())
for n in range(plan["steps"]):
    resilience.step(n)
    with resilience.section("train"):
        if (cycle, rank, n) == tuple(plan.get("hang", ())):
            time.sleep(plan.get("hang_s", 600))
        time.sleep(plan.get("step", 0.001))
    if n % plan.get("every", 100) == plan.get("every", 100) - 1:
        with resilience.section("checkpoint"):
            time.sleep(plan.get("checkpoint", 4 * plan.get("step", 0.075)))
    if n % 60 == 59:
        with resilience.section("evaluation"):
            time.sleep(6 * plan.get("step", 0.001))
    resilience.heartbeat()
"""


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    return launcher(start, tmp_path)


def planned(folder: Path, **plan: object) -> None:
    (folder / "plan.json").write_text(json.dumps(plan))


def calibrated(tmp_path: Path, *runs: str, options: Sequence[str] = ()) -> Timeouts:
    """Calibrate runs, as a user would type it, and return the limits in `timeouts.yaml` of the run directory. runs:
    names in that directory, or paths of run folders."""
    out = tmp_path / "runs" / "timeouts.yaml"
    folders = [str(tmp_path / "runs" / name) for name in runs]
    assert main(["calibrate", *folders, "--out", str(out), *options]) in (0, 3, 4)
    return timeouts_file.read(out)


def loaded(job: Launched) -> events.TimeoutsLoaded:
    (record,) = job.of(events.TimeoutsLoaded)
    assert isinstance(record.event, events.TimeoutsLoaded)
    return record.event


def assert_hang_is_left_out(known: Deadline, silent: events.RankFellSilent) -> None:
    """Check that this kill counts as a hang, neither as healthy nor as an occurrence of unknown health."""
    (hang_s,) = known.excluded_hangs
    assert hang_s >= 0.8 * silent.allowed_s
    assert not any("a limit ended" in warning for warning in known.warnings)
    assert known.max_s < silent.allowed_s


# So many false alarms in so short a time that a few hundred steps are enough to state the rate.
RATED_SOON = ("--target-false-alarms", "200", "--horizon", "10m", "--min-timeout", "0.01")


UNHURRIED = ("--min-timeout", "5s")  # a healthy rank may get no processor for a second on a busy machine


@pytest.mark.slow
def test_limits_learned_from_two_runs_find_a_hang_soon_and_leave_long_phases_alone(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(tmp_path, steps=130, step=0.15, every=20)
    for name in ("first", "second"):
        assert launch(TRAIN, nproc=4, RESILIENCE_JOB_ID=name).wait(120.0) == [0]
    sections = [f"--section={name}" for name in ("train", "checkpoint", "evaluation", "heartbeat")]
    found = calibrated(tmp_path, "first", "second", options=[*RATED_SOON, *sections])
    assert "still being written" not in capsys.readouterr().err
    train, checkpoint, evaluation = (found.deadlines[name] for name in ("train", "checkpoint", "evaluation"))
    assert checkpoint.status == evaluation.status == "insufficient"  # a few of each: no limit
    assert (train.status, train.runs, train.ranks) == ("ok", 2, 4)
    assert 240 <= train.n < 260  # the first of each run are warm-up
    assert 0.15 <= train.median_s < 0.2
    assert checkpoint.median_s >= 0.6 and evaluation.median_s >= 0.9
    # The same configuration again, with a hang: found at the limit, while long phases go on untouched.
    planned(tmp_path, steps=130, step=0.15, every=20, hang=[0, 2, 77])
    job = launch(TRAIN, "--timeouts", "auto", nproc=4, RESILIENCE_JOB_ID="third")
    assert job.wait(120.0) == [0]
    assert loaded(job).source == str(tmp_path / "runs" / "timeouts.yaml")
    (silent,) = [record.event for record in job.of(events.RankFellSilent)]  # the hang, and nothing else
    assert silent.limit == "section:train"
    assert silent.allowed_s == pytest.approx(train.timeout_s, rel=1e-4)
    assert silent.allowed_s < train.max_s * 5 / 2.5  # of what the rule of thumb would have allowed
    assert [record.event.outcome for record in job.of(events.CycleEnded)] == ["failed", "completed"]


# On a busy machine the first 50 occurrences may be warm-up, and a limit needs 30 others.
STANDS = """
import json, resilience
plan = json.loads((here / "plan.json").read_text())
for n in range(100):
    with resilience.section("train"):
        if [cycle, rank, n] == plan.get("stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if [cycle, rank, n] == plan.get("sleep"):
            time.sleep(600)
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("plan", "is_hang"),
    [({"stop": [0, 1, 70]}, True), pytest.param({"sleep": [0, 1, 70]}, False, marks=pytest.mark.slow)],
)
def test_section_that_a_learned_limit_ended_is_left_out_if_the_verdict_knows_that_it_hung(
    launch: Launch, tmp_path: Path, plan: dict[str, Any], is_hang: bool
) -> None:
    planned(tmp_path)
    assert launch(STANDS, RESILIENCE_JOB_ID="first").wait() == [0]
    assert calibrated(tmp_path, "first", options=UNHURRIED).deadlines["train"].timeout_s is not None
    planned(tmp_path, **plan)
    job = launch(STANDS, "--timeouts", "auto", RESILIENCE_JOB_ID="second")
    assert job.wait(120.0) == [0]
    (silent,) = [record.event for record in job.of(events.RankFellSilent)]
    assert silent.limit == "section:train"
    known = calibrated(tmp_path, "first", "second", options=UNHURRIED).deadlines["train"]
    if is_hang:
        assert_hang_is_left_out(known, silent)
    else:
        assert known.excluded_hangs == ()
        assert any("a limit ended 1 occurrence after " in warning for warning in known.warnings)


LIVES_ON = """
import json, resilience
plan = json.loads((here / "plan.json").read_text())
signals = []
for n in range(100):
    with resilience.section("train"):
        if [cycle, rank, n] == plan.get("late"):
            signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
            until = time.monotonic() + 250.0
            while not signals and time.monotonic() < until:
                time.sleep(0.01)
        elif signals and n == plan["late"][2] + 5:
            os._exit(3)
        time.sleep(0.01)
"""


def test_section_that_ended_after_its_learned_limit_fired_is_healthy_and_raises_the_limit(
    launch: Launch, tmp_path: Path
) -> None:
    """The rank handles SIGTERM: it finishes the slow section and four more ones, and ends in the next one."""
    planned(tmp_path)
    assert launch(LIVES_ON, RESILIENCE_JOB_ID="first").wait() == [0]
    before = calibrated(tmp_path, "first", options=UNHURRIED).deadlines["train"]
    planned(tmp_path, late=[0, 1, 70])
    options = ("--timeouts", "auto", "--ft-rank-termination-signal", "SIGTERM")
    job = launch(LIVES_ON, *options, RESILIENCE_JOB_ID="second", SLOW_ANSWERS="yes")
    assert job.wait() == [0]
    (silent,) = [record.event for record in job.of(events.RankFellSilent)]
    assert (silent.limit, silent.allowed_s) == ("section:train", pytest.approx(before.timeout_s, rel=1e-4))
    limits = calibrated(tmp_path, "first", "second", options=UNHURRIED).deadlines
    after = limits["train"]
    assert before.max_s < silent.allowed_s <= after.max_s
    assert after.timeout_s == pytest.approx(5 * after.max_s, rel=1e-4)
    assert not any("a limit ended" in warning for known in limits.values() for warning in known.warnings)
    assert [known.excluded_hangs for known in limits.values() if known.excluded_hangs] == []


STEPS = """
import resilience, time
for n in range(120):
    resilience.step(n)
    time.sleep(0.01)
"""


def test_file_fits_later_runs_whatever_their_options_and_arguments_and_says_what_differs(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(STEPS, RESILIENCE_JOB_ID="first").wait() == [0]
    elsewhere = tmp_path / "elsewhere"
    options = ("--run-dir", str(elsewhere), "--max-restarts", "3")
    assert launch(STEPS, *options, RESILIENCE_JOB_ID="second").wait() == [0]
    found = calibrated(tmp_path, "first", str(elsewhere / "second"), options=UNHURRIED)
    told = capsys.readouterr().err
    assert "differ" not in told and "still being written" not in told
    assert found.deadlines["step"].runs == 2
    file = str(tmp_path / "runs" / "timeouts.yaml")
    for name, source in (("third", file), ("fourth", "auto")):
        job = launch(
            STEPS, "--timeouts", source, "--max-restarts", "1", RESILIENCE_JOB_ID=name, script_args="--resume X"
        )
        assert job.wait() == [0]
        event = loaded(job)
        assert (event.source, event.is_same_configuration) == (file, True)
        assert event.deadlines >= 1
        assert "arguments '' before, '--resume X' now" in event.note
        assert job.of(events.RankFellSilent) == []


def test_runs_that_differ_in_their_run_dir_alone_are_one_configuration(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name / "job" for name in ("here", "there")]
    for folder in folders:
        assert launch(STEPS, "--run-dir", str(folder.parent), RESILIENCE_JOB_ID="job").wait() == [0]
    capsys.readouterr()
    assert main(["calibrate", *map(str, folders), *UNHURRIED, "--json"]) in (0, 3, 4)
    printed = capsys.readouterr()
    assert printed.err == ""  # no difference is named
    step = json.loads(printed.out)["deadlines"]["step"]
    assert (step["runs"], step["n"] > 120) == (2, True)  # more than one run has; up to 50 of each are warm-up


PAUSES = """
import json, resilience, threading
plan = json.loads((here / "plan.json").read_text())
for n in range(80):
    resilience.step(n)
    if [cycle, rank, n] == plan.get("pause"):
        time.sleep(25.0)
    if [cycle, rank, n] == plan.get("hang"):
        threading.Event().wait()
    time.sleep(0.01)
"""


@pytest.mark.slow  # 47 s: it waits for silences of both lengths
def test_learned_limit_replaces_the_rule_for_silences_whether_it_is_longer_or_shorter(
    launch: Launch, tmp_path: Path
) -> None:
    planned(tmp_path)
    assert launch(PAUSES, RESILIENCE_JOB_ID="first").wait() == [0]
    assert calibrated(tmp_path, "first", options=("--min-timeout", "600s")).deadlines["step"].timeout_s == 600.0
    planned(tmp_path, pause=[0, 1, 40])
    # It holds for a start and an end, too, which take seconds on a busy machine.
    impatient = ("--ft-hang-first-limit", "10", "--max-restarts", "0")
    ruled = launch(PAUSES, *impatient, RESILIENCE_JOB_ID="ruled")
    assert ruled.wait() == [1]
    assert {record.event.limit for record in ruled.of(events.RankFellSilent)} == {"silence"}
    longer = launch(PAUSES, "--timeouts", "auto", *impatient, RESILIENCE_JOB_ID="longer")
    assert longer.wait() == [0]
    assert loaded(longer).deadlines >= 1
    assert longer.of(events.RankFellSilent) == []
    (tmp_path / "runs" / "timeouts.yaml").unlink()  # a limit that is written there never falls
    step = calibrated(tmp_path, "first", options=UNHURRIED).deadlines["step"]
    planned(tmp_path, hang=[0, 1, 40])
    shorter = launch(PAUSES, "--timeouts", "auto", RESILIENCE_JOB_ID="shorter")
    assert shorter.wait(120.0) == [0]
    (silent,) = [record.event for record in shorter.of(events.RankFellSilent) if record.origin.rank == 1]
    assert (silent.limit, silent.allowed_s) == ("step", pytest.approx(step.timeout_s, rel=1e-4))
    assert silent.allowed_s < Rule().first


@pytest.mark.slow
def test_cycle_with_fewer_ranks_than_observed_says_that_learned_limits_do_not_hold(
    launch: Launch, tmp_path: Path
) -> None:
    """They hold for a job of up to two nodes, and only one comes."""
    elastic: dict[str, Any] = {"nodes": "1:2", "nproc": 1}
    assert launch(STEPS, agents=2, RESILIENCE_JOB_ID="first", **elastic).wait() == [0, 0]
    assert calibrated(tmp_path, "first", options=UNHURRIED).configuration.world_size == 2
    job = launch(STEPS, "--timeouts", "auto", conf="last_call_timeout=0.3", RESILIENCE_JOB_ID="smaller", **elastic)
    assert job.wait() == [0]
    (record,) = job.of(events.TimeoutsUnlearned)
    assert record.event == events.TimeoutsUnlearned(world_size=1, least_world_size=2, most_world_size=2)
    sentence = "learned limits hold for 2 ranks, not for the 1 of this cycle: configured limits hold"
    assert f"resilience run: {sentence}" in job.output(stream=2)
    run = tmp_path / "runs" / "smaller"
    assert sentence in [note.what for note in report(load(run)).notes]
    spans = [span for batch in spans_of(run) for span in batch.spans]
    assert "timeouts.unlearned" in [noted.name for span in spans for noted in span.events]


def test_file_that_does_not_fit_is_refused_with_the_reason(launch: Launch, tmp_path: Path) -> None:
    assert launch(STEPS, RESILIENCE_JOB_ID="first").wait() == [0]
    calibrated(tmp_path, "first")
    file = str(tmp_path / "runs" / "timeouts.yaml")
    larger = launch(STEPS, "--timeouts", file, nproc=3, RESILIENCE_JOB_ID="larger")
    assert larger.wait() == [2]
    told = larger.output(stream=2)
    assert "world size '2' before, '3' now: limits hold for 2 ranks; ranks per node '2' before, '3' now" in told
    other = launch(STEPS, "--timeouts", file, "--calibration-key", "large", RESILIENCE_JOB_ID="other")
    assert other.wait() == [2]
    assert "workload 'script.py' before, 'large' now" in other.output(stream=2)
    assert {run.name for run in (tmp_path / "runs").iterdir() if run.is_dir()} == {"first"}  # nothing has started
    passed_over = launch(STEPS, "--timeouts", "auto", "--calibration-key", "large", RESILIENCE_JOB_ID="auto")
    assert passed_over.wait() == [0]
    assert loaded(passed_over).deadlines == 0
    assert "workload 'script.py' before, 'large' now" in passed_over.output(stream=2)


LATE = """
import json, resilience
import torch.distributed as dist
plan = json.loads((here / "plan.json").read_text())
dist.init_process_group("gloo")
for n in range(90):
    with resilience.section("train"):
        time.sleep(plan["late"] if (cycle, rank, n) == (0, 1, 70) else 0.01)
    with resilience.section("sync"):
        dist.barrier()
"""


def test_rank_that_is_late_below_its_limit_is_suspected_and_lives_unless_suspects_are_ended(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(tmp_path, late=0.01)
    for name in ("first", "second"):
        assert launch(LATE, RESILIENCE_JOB_ID=name).wait() == [0]
    found = calibrated(tmp_path, "first", "second", options=("--min-timeout", "12s"))
    assert found.deadlines["train"].timeout_s == 12.0
    planned(tmp_path, late=8.0)
    job = launch(LATE, "--timeouts", "auto", RESILIENCE_JOB_ID="third", SLOW_ANSWERS="yes")
    assert job.wait() == [0]
    assert job.of(events.RankFellSilent) == []
    first_look = next(record.event for record in job.of(events.RankSuspicionCompared) if record.origin.rank == 1)
    assert (first_look.limit, first_look.waiting, first_look.busy, first_look.missing) == (
        "section:train",
        (0,),
        (),
        (),
    )
    suspected = [record.event for record in job.of(events.RankSuspected) if record.origin.rank == 1]
    assert [event.limit for event in suspected] == ["section:train"]
    assert suspected[0].silent_for_s >= 3.0 and suspected[0].allowed_s == 12.0
    assert suspected[0].look_s > 0.0
    assert main(["report", str(tmp_path / "runs" / "third")]) == 0
    assert "a rank was late in train" in " ".join(capsys.readouterr().out.split())
    planned(tmp_path, late=600.0)
    hung = launch(
        LATE, "--timeouts", "auto", "--ft-end-suspected-ranks", RESILIENCE_JOB_ID="fourth", SLOW_ANSWERS="yes"
    )
    assert hung.wait() == [0]
    (ended,) = [record.event for record in hung.of(events.RankFellSilent)]
    assert (ended.limit, ended.severity) == ("section:train", "hard")
    assert ended.allowed_s == pytest.approx(3.0) and ended.silent_for_s >= 4.0
    compared = [record.event for record in hung.of(events.RankSuspicionCompared) if record.origin.rank == 1]
    assert [(event.look, event.waiting, event.is_confirmed) for event in compared] == [
        (1, (0,), False),
        (2, (0,), True),
    ]
    assert main(["report", str(tmp_path / "runs" / "fourth")]) == 0
    report = " ".join(capsys.readouterr().out.split())
    assert "a rank stood still in train while the other rank" in report


LOADS = """
import json
from resilience.fault_tolerance import RankMonitorClient
plan = json.loads((here / "plan.json").read_text())
client = RankMonitorClient()
client.init_workload_monitoring()
if plan.get("hang") == [cycle, rank]:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(plan["load"])
for n in range(40):
    client.send_heartbeat()
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_job_that_loads_for_long_before_its_first_heartbeat_lives_with_learned_limits(
    launch: Launch, tmp_path: Path
) -> None:
    planned(tmp_path, load=6.0)  # longer than the least limit
    for name in ("first", "second"):
        assert launch(LOADS, RESILIENCE_JOB_ID=name).wait() == [0]
    found = calibrated(tmp_path, "first", "second", options=UNHURRIED).deadlines
    initial, heartbeat = found["initial_heartbeat"], found["heartbeat"]
    assert initial.max_s >= 6.0 and initial.n == 2
    assert initial.timeout_s == pytest.approx(5 * initial.max_s, rel=1e-4)
    assert heartbeat.median_s < 1.0
    healthy = launch(LOADS, "--timeouts", "auto", RESILIENCE_JOB_ID="third")
    assert healthy.wait() == [0]
    assert healthy.of(events.RankFellSilent) == []
    planned(tmp_path, load=6.0, hang=[0, 1])
    stopped = launch(LOADS, "--timeouts", "auto", RESILIENCE_JOB_ID="fourth")
    assert stopped.wait(180.0) == [0]
    (silent,) = [record.event for record in stopped.of(events.RankFellSilent)]
    assert (silent.limit, silent.allowed_s) == ("initial_heartbeat", pytest.approx(initial.timeout_s, rel=1e-4))
    again = calibrated(tmp_path, "first", "second", "third", "fourth", options=UNHURRIED).deadlines["initial_heartbeat"]
    assert again.runs >= 3
    assert_hang_is_left_out(again, silent)


def wrapped(steps: int) -> None:
    """A function under the in-process wrapper that shows sections and beats, and fails once."""
    from datetime import timedelta

    import resilience
    from resilience.inprocess import CallWrapper, Wrapper

    @Wrapper(soft_timeout=timedelta(seconds=20), hard_timeout=timedelta(seconds=30))
    def train(call: CallWrapper | None = None) -> None:
        for n in range(steps):
            resilience.step(n)
            with resilience.section("train"):
                if n == steps // 2 and call is not None and call.iteration == 0:
                    raise ValueError("once")
            resilience.heartbeat()

    train()


def wrapped_pausing(pauses: bool = False, hangs: bool = False) -> int:
    """A function under the Wrapper of which rank 1 pauses for seconds or hangs in its first iteration."""
    import os
    import time
    from datetime import timedelta

    import resilience
    from resilience.inprocess import CallWrapper, Wrapper

    @Wrapper(soft_timeout=timedelta(seconds=60), hard_timeout=timedelta(seconds=90))
    def train(call: CallWrapper | None = None) -> int:
        assert call is not None
        for n in range(80):
            resilience.step(n)
            if (call.iteration, os.environ["RANK"], n) == (0, "1", 40):
                while hangs:
                    time.sleep(0.1)
                time.sleep(25.0 * pauses)
            time.sleep(0.01)
        return call.iteration

    result: int = train()
    return result


@pytest.mark.slow
def test_learned_limit_replaces_the_rule_for_silences_in_a_wrapper(start: Callable[..., Job], tmp_path: Path) -> None:
    def begun(name: str, env: dict[str, str], **options: bool) -> Job:
        job = start(2, f"{__name__}:wrapped_pausing", env={"RESILIENCE_JOB_ID": name, **env}, **options)
        job.account = Account(tmp_path / "runs" / name)
        return job

    def limits(least: str) -> dict[str, str]:
        """Calibrate the first run, as a user would type it."""
        out = tmp_path / f"{least}.yaml"
        folder = str(tmp_path / "runs" / "first")
        assert main(["calibrate", folder, "--out", str(out), "--min-timeout", least]) in (0, 3, 4)
        return {"RESILIENCE_TIMEOUTS": str(out)}

    impatient = {"RESILIENCE_HANG_FIRST_LIMIT": "10"}
    assert [rank.value for rank in begun("first", {}).wait()] == [0, 0]
    ruled = begun("ruled", impatient, pauses=True)
    assert [rank.value for rank in ruled.wait()] == [1, 1]
    assert limits_that_ended(ruled) == {"silence"}
    longer = begun("longer", impatient | limits("600s"), pauses=True)
    assert [rank.value for rank in longer.wait()] == [0, 0]
    assert limits_that_ended(longer) == set()
    shorter = begun("shorter", limits("5s"), hangs=True)
    assert [rank.value for rank in shorter.wait()] == [1, 1]
    assert limits_that_ended(shorter) == {"step"}


def limits_that_ended(job: Job) -> set[str]:
    """The limits that a silent rank exceeded in the first iteration."""
    records = job.interruptions(0)
    return {each.detector.name for each in records if each.detector and each.interruption is Interruption.SOFT_TIMEOUT}


def test_wrapper_records_the_same(start: Callable[..., Job]) -> None:
    job = start(2, f"{__name__}:wrapped", steps=100)
    job.wait()
    paths = sorted((job.run / "timings").glob("*.jsonl"))
    assert len(paths) == 2
    lines = [json.loads(line) for line in paths[0].read_text().splitlines()]
    assert lines[0]["kind"] == "header" and lines[0]["configuration"]["world_size"] == 2
    starts = [line for line in lines if line["kind"] == "start"]
    assert [line["iteration"] for line in starts][-1] == 1
    values = [line for line in lines if line["kind"] == "value"]
    assert {value["section"] for value in values} == {"train", "heartbeat", "out_of_section", "step"}
    # Both raise in step 50, unless the first one's interruption finds the other before that.
    cut = [json.loads(line) for path in paths for line in path.read_text().splitlines() if '"cut"' in line]
    assert 50 in [value["i"] for value in cut]


def test_timings_survive_the_ranks_death_and_say_how_a_section_ended(launch: Launch, tmp_path: Path) -> None:
    planned(tmp_path, steps=50)
    dying = "if n == 40 and rank and not cycle: os.kill(os.getpid(), 9)"
    script = TRAIN.replace("    if n % plan", f"        {dying}\n    if n % plan", 1)
    assert launch(script).wait() == [0]
    lines = [json.loads(line) for line in (tmp_path / "runs/job/timings/node0-1.jsonl").read_text().splitlines()]
    values = [line for line in lines if line["kind"] == "value" and line["section"] == "train"]
    assert [value["i"] for value in values if value.get("end") == "cut"] == [40]
    assert len([line for line in lines if line["kind"] == "start"]) == 2
    assert {line["j"] for line in values} >= set(range(40))


def test_shadow_mode_tells_and_does_nothing(launch: Launch, tmp_path: Path) -> None:
    planned(tmp_path, steps=110, checkpoint=3.0)
    (tmp_path / "limits.yaml").write_text(
        "schema: 2\nconfiguration: {table: x}\ncreated: now\ntarget_false_alarms: 1\nhorizon_s: 1.0\nranks: 2\n"
        "deadlines:\n  checkpoint: {timeout_s: 0.05, status: ok, reason: '', p: 0.1, max_s: 0.05, median_s: 0.01}\n"
    )
    limits = str(tmp_path / "limits.yaml")
    job = launch(TRAIN, "--timeouts", limits, "--timeouts-shadow")
    assert job.wait() == [0]
    alarms = [(record.origin.rank, record.event.limit) for record in job.of(events.TimeoutsShadowAlarm)]
    assert sorted(alarms) == [(0, "section:checkpoint"), (1, "section:checkpoint")]
    assert job.of(events.RankFellSilent) == []
    acting = launch(TRAIN, "--timeouts", limits, "--max-restarts", "0", RESILIENCE_JOB_ID="acting")
    assert acting.wait() == [1]
    assert {record.event.limit for record in acting.of(events.RankFellSilent)} == {"section:checkpoint"}


def test_shadow_mode_tries_the_limits_of_the_ranks_own_group_and_those_outside_known_phases(
    launch: Launch, tmp_path: Path
) -> None:
    planned(tmp_path, steps=110, checkpoint=3.0, hang=[0, 0, 50], hang_s=6.0)
    first = launch(TRAIN, RESILIENCE_JOB_ID="first")
    assert first.wait() == [0]
    header, *_ = (tmp_path / "runs/first/timings/node0-0.jsonl").read_text().splitlines()
    configuration = json.dumps(json.loads(header)["configuration"])  # limits outside phases hold for an equal one only
    (tmp_path / "limits.yaml").write_text(
        f"schema: 2\nconfiguration: {configuration}\ncreated: now\n"
        "target_false_alarms: 1\nhorizon_s: 1.0\nranks: 2\ndeadlines:\n"
        "  checkpoint: {timeout_s: 600, status: ok, reason: '', p: 0.1,\n"
        "    groups: [{ranks: '1', timeout_s: 0.05, status: ok, reason: ''}]}\n"
        "  train: {timeout_s: 600, status: ok, reason: '', p: 0.1,\n"
        "    outside: {timeout_s: 2.0, status: short, reason: '', phases: {positions: [], until: 1000}}}\n"
    )
    job = launch(TRAIN, "--timeouts", str(tmp_path / "limits.yaml"), "--timeouts-shadow")
    assert job.wait() == [0]
    alarms = {
        (record.origin.rank, record.event.limit, record.event.allowed_s)
        for record in job.of(events.TimeoutsShadowAlarm)
    }
    stood_still = {(1, "section:train", 2.0)}  # by a rank that gets no processor for so long
    assert alarms - stood_still == {(0, "section:train", 2.0), (1, "section:checkpoint", 0.05)}
    assert job.of(events.RankFellSilent) == []


def test_auto_without_an_earlier_fit_says_so_and_goes_on(launch: Launch, tmp_path: Path) -> None:
    planned(tmp_path, steps=3)
    job = launch(TRAIN, "--timeouts", "auto")
    assert job.wait() == [0]
    (loaded,) = [record.event for record in job.of(events.TimeoutsLoaded)]
    assert loaded.deadlines == 0
    assert "no timeouts.yaml for script.py, 2 ranks, 2 a node" in job.output(stream=2)


def test_file_of_limits_that_is_none_ends_the_launcher_at_once(launch: Launch, tmp_path: Path) -> None:
    planned(tmp_path, steps=3)
    assert launch(TRAIN, "--timeouts", str(tmp_path / "plan.json")).wait() == [2]
