"""What must not hold up the end of workers and agents: programs that look for a stop, terminals that nobody reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.facts import events
from tests.process.launching import Launched, launcher
from tests.support.ranks import Job
from tests.support.server import ROOT

Launch = Callable[..., Launched]

LOOKING = """
import resilience
resilience.stop_requested()
say("up")
if cycle == 0 and rank == 1:
    while not (here / "up.0.0").exists():
        time.sleep(0.005)
    os._exit(3)
while cycle == 0:
    if resilience.stop_requested():
        say("stopped")
        sys.exit()
    time.sleep(0.005)
"""


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    return launcher(start, tmp_path)


def test_program_that_looks_for_a_stop_is_ended_by_sigterm_when_another_rank_fails(launch: Launch) -> None:
    job = launch(LOOKING)
    assert job.wait() == [0]
    assert [record.event.why for record in job.of(events.CycleStarted)] == ["first", "failure"]
    (other,) = [
        record.event for record in job.of(events.WorkerExited) if record.origin.cycle == 0 and record.event.expected
    ]
    assert (other.worker_rank, other.signal) == (0, signal.SIGTERM.name)
    assert job.of(events.ControlRequested) == job.of(events.StopRequested) == []
    assert not list(job.folder.glob("stopped.*"))


SAVING = """
def save(number, frame):
    time.sleep(3.0)
    say("saved")
    os._exit(0)

signal.signal(signal.SIGTERM, save)
say("up")
while True:
    time.sleep(0.05)
"""


def test_worker_has_the_term_timeout_after_a_sigterm_to_the_agent(launch: Launch) -> None:
    job = launch(SAVING, "--shutdown-timeout", "1", "--term-timeout", "60")
    for rank in range(2):
        job.job.await_sign_file(job.folder / f"up.0.{rank}")
    job.job.signal(0, signal.SIGTERM)
    assert job.wait() == [128 + signal.SIGTERM]
    assert len(list(job.folder.glob("saved.*"))) == 2
    assert {record.event.code for record in job.of(events.WorkerExited)} == {0}


def test_unread_terminal_blocks_neither_a_restart_nor_the_end_of_the_job(launch: Launch) -> None:
    script = """
print("x" * 100_000, flush=True)
say("printed")
await_file(f"printed.{cycle}.{1 - rank}")  # the end of one rank ends the other
sys.exit(3)
"""
    job = launch(script, "--max-restarts", "1", UNREAD="1")
    assert job.wait() == [1]
    assert [record.event.why for record in job.of(events.CycleStarted)] == ["first", "failure"]
    assert job.of(events.JobEnded)[0].event.outcome == "exhausted"
    assert (job.job.run / "output" / "1" / "0.out").read_text() == "x" * 100_000 + "\n"


def test_signal_ends_the_wait_for_a_rendezvous_that_is_not_there(launch: Launch, tmp_path: Path) -> None:
    waits = tmp_path / "waits"
    job = launch("", nodes="2", agents=1, per_agent=({"PET_RDZV_CONF": "is_host=0", "WAITS": str(waits)},))
    job.job.await_sign_file(waits)
    job.job.signal(0, signal.SIGTERM)
    assert job.wait() == [128 + signal.SIGTERM]
    assert "SIGTERM arrived before the rendezvous was reached" in job.output(stream=2)


@pytest.mark.slow
def test_nodes_agree_on_the_name_of_a_job_that_has_none(launch: Launch, tmp_path: Path) -> None:
    job = launch("", "--rdzv-id", "none", nodes="2", agents=2, RESILIENCE_JOB_ID="")
    assert job.wait() == [0, 0]
    (folder,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in (folder / "records").glob("*-agent.jsonl")} == {
        "node0-agent.jsonl",
        "node1-agent.jsonl",
    }


IN_AN_IMPORT = """
import os, signal, sys
from resilience.cli import main

class LosesWhatItsImportsRaise:
    def find_spec(self, name, path=None, target=None):
        if name == "resilience.launcher.launch":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
sys.meta_path.insert(0, LosesWhatItsImportsRaise())
print("starts", flush=True)
sys.exit(main(["run", "--nproc-per-node", "1", sys.argv[1]]))
"""


def test_ctrl_c_is_not_lost_while_the_launcher_imports_its_modules(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('trained', 'w').close()")
    command = [sys.executable, "-c", IN_AN_IMPORT, str(tmp_path / "train.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "starts\n", "")
    assert not (tmp_path / "trained").exists()


IN_A_REMOVED_FOLDER = """
import os, sys
os.rmdir(os.getcwd())
os.execv(sys.executable, [sys.executable, "-m", "resilience.cli", "run", "--nproc-per-node", "1", sys.argv[1]])
"""


def test_launcher_in_a_removed_working_directory_says_so_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    command = [sys.executable, "-c", IN_A_REMOVED_FOLDER, str(tmp_path / "train.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path / "gone", env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("resilience run: the working directory does not exist any more")
