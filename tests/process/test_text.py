"""Text and bytes that somebody else chose: names that are not UTF-8, damaged files, datagrams that mean nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from resilience.facts import events
from resilience.facts.interruptions import Interruption
from resilience.report.condensed import report
from resilience.run_folder.load import load, runs_in
from tests.process.jobs import GARBAGE, RESULT
from tests.process.launching import launcher
from tests.process.leftovers import left_after
from tests.support.ranks import Job

pytestmark = pytest.mark.timeout(900)  # together they may take longer than 300 s on a busy machine

Start = Callable[..., Job]
TRAIN = "tests.process.jobs:train"
CAFE = os.fsdecode(b"caf\xe9")
ESCAPED = "caf\\udce9"
SCRIPT = """
import os, sys, time
from pathlib import Path
import resilience
from resilience.inprocess import CallWrapper, Wrapper

assert sys.argv[1] == "--data=" + os.fsdecode(b"caf\\xe9"), sys.argv

@Wrapper()
def train(call: CallWrapper | None = None):
    resilience.get_logger().info("reading " + sys.argv[1], **{sys.argv[1]: sys.argv[1]})
    with resilience.section(sys.argv[1]):
        resilience.step(1)
    is_read = Path(__file__).with_name("is_read")
    if os.environ["RANK"] == "0":
        is_read.touch()
    elif call.iteration == 0:
        while not is_read.exists():
            time.sleep(0.01)
        raise ValueError("cannot read " + sys.argv[1])
    return call.iteration

assert train() == 1
"""


def exception_at(kind: str, rank: int = 1) -> dict[str, object]:
    return {"kind": kind, "rank": rank, "iteration": 0, "step": 5}


def test_exception_whose_message_is_no_utf_8_restarts_all_and_names_its_rank(start: Start) -> None:
    job = start(2, TRAIN, faults=[exception_at("undecodable")])
    assert [rank.value for rank in job.wait()] == [RESULT] * 2
    first = job.interruptions(0)[0]
    assert (first.rank, first.interruption) == (1, Interruption.EXCEPTION)
    assert first.exception is not None
    assert first.exception.message == f"cannot decode {ESCAPED}.jpg"
    (incident,) = report(load(job.run)).incidents
    assert [culprit.rank for culprit in incident.verdict.culprits] == [1]


def test_script_and_argument_that_are_no_utf_8_restart_under_the_wrapper(start: Start, tmp_path: Path) -> None:
    script = tmp_path / CAFE / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    runs = script.parent / "runs"  # whose path is no UTF-8 either
    env = {"RESILIENCE_RUN_DIR": str(runs), "RESILIENCE_JOB_ID": CAFE, "RESILIENCE_NODE": f"node-{CAFE}"}
    job = start(2, "tests.support.scripts:run", env=env, path=str(script), arguments=[f"--data={CAFE}"])
    assert [rank.code for rank in job.wait_ranks()] == [0, 0]
    assert not psutil.wait_procs(job.left_behind(), 120.0)[1]  # who ends last writes last
    (run,) = runs_in(runs)
    assert run.name == ESCAPED
    _check(run, script)


def test_script_and_argument_that_are_no_utf_8_restart_under_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / CAFE / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    runs = script.parent / "runs"
    command = [sys.executable, "-m", "resilience.launcher", "--nproc-per-node", "2"]
    command += ["--run-dir", str(runs), "--rdzv-id", CAFE, str(script), f"--data={CAFE}"]
    env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(command, env=env, cwd=script.parent, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert not left_after(runs)
    (run,) = runs_in(runs)
    _check(run, script)


def _check(run: Path, script: Path) -> None:
    """The account of SCRIPT is whole, and its text escaped."""
    found = load(run)
    assert not found.missing, found.missing
    assert found.job is not None
    assert found.job.command[-1] == f"--data={ESCAPED}"
    told = [record.event.record for record in found.records if isinstance(record.event, events.RankInterrupted)]
    (own,) = [each for each in told if each.rank == 1 and each.exception and each.exception.type == "ValueError"]
    assert own.exception is not None
    assert own.exception.message == f"cannot read --data={ESCAPED}"
    assert own.exception.stack[-1].file == str(script).replace(CAFE, ESCAPED)
    (incident,) = report(found).incidents
    assert [culprit.rank for culprit in incident.verdict.culprits] == [1]
    logs = b"".join(path.read_bytes() for path in (run / "logs").iterdir())
    assert logs.count(rb"reading --data=caf\\udce9") == 4  # both ranks, in both iterations


def test_datagrams_that_mean_nothing_are_counted_and_the_monitor_lives(start: Start) -> None:
    job = start(2, TRAIN, faults=[exception_at("garbage"), {**exception_at("exception"), "step": 8}])
    assert [rank.value for rank in job.wait()] == [RESULT] * 2
    dropped = [record.event for record in job.of(events.TelemetryDropped, rank=1) if record.event.signal == "record"]
    assert sum(event.count for event in dropped if "malformed" in event.reason) == len(GARBAGE)
    assert not job.of(events.MonitorLost)
    assert job.of(events.MonitorEnded, rank=1)


def test_damaged_files_of_timings_do_not_cost_a_monitor(start: Start, tmp_path: Path) -> None:
    script = """
    import contextlib, resilience

    run = pathlib.Path(os.environ["RESILIENCE_RUN_FOLDER"])
    if rank == 0:
        (run / "timings").mkdir(exist_ok=True)
        for suffix in ("json", "hist", "signs", "jsonl"):
            (run / "timings" / f"node0-0.{suffix}").write_bytes(b'{"sections":{"da\\xff":' + b"[" * 5000)
            with contextlib.suppress(FileExistsError):
                (run / "timings" / f"node0-1.{suffix}").mkdir()
        (run / "job.json").write_bytes(b'{"job_id":"\\xff"}')
        (here / "damaged").touch()
    await_file("damaged")
    for n in range(5):
        resilience.step(n)
        with resilience.section("data"):
            pass
    """
    job = launcher(start, tmp_path)(script, "--timeouts", "auto", UNPROBED="yes")
    assert job.wait() == [0]
    assert not job.of(events.MonitorLost)
    assert len([record for record in job.account.records() if isinstance(record.event, events.MonitorEnded)]) == 2


@pytest.mark.parametrize(
    "damage", [b"\xff", b"[" * 3000, b"a: !!int x", b"\0", b"schema: 1\ndeadlines: {a: {timeout_s: .nan}}"]
)
def test_damaged_file_of_limits_is_refused_at_the_start_with_its_name(
    start: Start, tmp_path: Path, damage: bytes
) -> None:
    path = tmp_path / "timeouts.yaml"
    path.write_bytes(damage)
    job = start(1, TRAIN, env={"RESILIENCE_TIMEOUTS": str(path)})
    (rank,) = job.wait_ranks()
    assert rank.type == "ConfigurationError"
    assert str(path) in rank.error


# -- commands that read ------------------------------------------------------------------------------

COMMANDS = (
    ("report",),
    ("report", "--json"),
    ("report", "--incident", "1"),
    ("status",),
    ("status", "--json"),
    ("logs",),
    ("logs", "--json"),
    ("logs", "--around", "1"),
    ("logs", "--sql", "select count(*) from records"),
    ("trace",),
    ("trace", "--format", "perfetto"),
    ("trace", "--incident", "1"),
)
EVERY_COMMAND = """
import contextlib, io, sys, traceback
from resilience.cli import main
sys.stdout.reconfigure(encoding="ascii")  # a terminal that can show little
for command in {commands!r}:
    try:
        status = main([command[0], {run!r}, *command[1:]])
    except SystemExit as error:
        status = error.code
    except BaseException:
        print(command, file=sys.stderr)
        traceback.print_exc()
        sys.exit(70)
    assert status in (0, 1, 2), (command, status)
"""


def test_commands_that_read_a_damaged_run_never_show_a_traceback(start: Start, tmp_path: Path) -> None:
    job = start(2, TRAIN, faults=[exception_at("undecodable"), {**exception_at("kill", rank=0), "iteration": 1}])
    job.wait()
    for number in range(6):
        run = tmp_path / "damaged" / str(number)
        shutil.copytree(job.run, run)
        _damage(run, random.Random(number))
        script = EVERY_COMMAND.format(commands=COMMANDS, run=str(run))
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, f"run {number}\n{done.stderr}"


def _damage(run: Path, chance: random.Random) -> None:
    """Damage most files of a run, each in its own way."""
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        data = path.read_bytes()
        at = chance.randrange(len(data) + 1)
        match chance.randrange(8):
            case 0:
                path.write_bytes(b"")
            case 1:
                path.write_bytes(data[:at])
            case 2:
                path.write_bytes(data[:at] + b"\xff\x00\xed\xb3\xa9" + data[at:])
            case 3:
                path.write_bytes(b"[" * 100_000 + b"\n" + data)
            case 4:
                path.unlink()
                path.mkdir()
            case 5:
                path.write_bytes(data.replace(b":1", b":1" + b"0" * 40))
            case 6:
                path.write_bytes(chance.randbytes(2000))
            case _:
                path.write_bytes(textwrap.dedent('{"event": "x", "event": NaN}\n').encode() + data)


def test_command_line_that_is_longer_than_a_message_starts_a_job(start: Start) -> None:
    job = start(2, "tests.process.jobs:complete_with_a_long_command_line")
    assert [rank.value for rank in job.wait()] == [0, 0]
    command = json.loads((job.run / "job.json").read_text())["command"]
    assert command[:2] == ["train.py", "--short"]
    assert "more, " in command[-1]
