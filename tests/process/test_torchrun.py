"""The wrapper under stock torchrun, whose agent hosts the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resilience.facts import events
from resilience.report.condensed import report
from resilience.run_folder.load import load
from tests.support.account import Account
from tests.support.ranks import free_port

SCRIPT = Path(__file__).parent / "scripts" / "under_torchrun.py"


@pytest.mark.slow
def test_function_restarts_in_place_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    env = dict(os.environ, RESILIENCE_RUN_DIR=str(tmp_path), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("result 4.0") == 2
    (run,) = tmp_path.iterdir()
    account, deadline = Account(run), time.monotonic() + 30
    left: set[int | None] = set()
    while left != {0, 1}:  # their last words: no monitor stays behind
        left = {r.origin.initial_rank for r in account.records() if isinstance(r.event, events.MonitorEnded)}
        assert time.monotonic() < deadline, f"only the monitors of ranks {left} have ended within 30 s"
        time.sleep(0.05)


GIVES_UP = """
import os
from resilience.inprocess import Wrapper
from resilience.inprocess.exception import RestartAbort

@Wrapper()
def train():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RestartAbort("by schedule")

train()
"""


@pytest.mark.parametrize(
    "run_id", [[], pytest.param(["--rdzv-id=named"], marks=pytest.mark.slow)], ids=["without a run id", "with a run id"]
)
def test_restarts_by_torchrun_are_cycles_of_one_job(tmp_path: Path, run_id: list[str]) -> None:
    (tmp_path / "train.py").write_text(GIVES_UP)
    options = ["--nproc-per-node=2", "--max-restarts=1", f"--master-port={free_port()}", *run_id]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(tmp_path / "train.py")]
    env = dict(os.environ, RESILIENCE_RUN_DIR=str(tmp_path / "runs"), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    started = [record.origin for record in load(run).records if isinstance(record.event, events.CallStarted)]
    assert len({(origin.job_id, origin.attempt) for origin in started}) == 1
    assert {origin.cycle for origin in started} == {0, 1}
    summary = report(load(run))
    assert summary.attempts == 1
    assert [(incident.attempt, incident.cycle) for incident in summary.incidents] == [(0, 0)]


DIES = """
import os, signal, sys, time
import resilience
from resilience.inprocess import Wrapper
from resilience.inprocess.finalize import Finalize

class WaitForTheLauncher(Finalize):
    def __call__(self, state, exc):
        signal.pause()

@Wrapper(finalize=WaitForTheLauncher())
def train():
    for step in range(4):
        resilience.step(step)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").close()
        while len(os.listdir(sys.argv[1])) < 2 or os.environ["RANK"] == "0":
            time.sleep(0.01)  # rank 0 until it is interrupted
        os.kill(os.getpid(), signal.SIGKILL)

train()
"""


def test_restart_by_torchrun_is_the_same_in_every_view(tmp_path: Path) -> None:
    """Rank 1 dies at step 3. torchrun stops rank 0 in its restart, and starts both again with step 0."""
    (tmp_path / "train.py").write_text(DIES)
    (tmp_path / "reached").mkdir()
    options = ["--nproc-per-node=2", "--max-restarts=1", f"--master-port={free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(tmp_path / "train.py")]
    env = dict(os.environ, RESILIENCE_RUN_DIR=str(tmp_path / "runs"), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(
        [*command, str(tmp_path / "reached")], env=env, capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    summary = report(load(run))
    (incident,) = summary.incidents
    assert (incident.status, incident.excluded, incident.verdict.first) == ("restarted", (), 1)
    assert incident.actions[-1] == "started again by the launcher: ranks 0-1"
    assert (incident.cost.lost_steps, incident.next_world_size) == (3, 2)
    assert [(took.layer, took.restarts, took.ranks) for took in summary.restarts] == [("launcher", 1, 2)]
    assert incident.restart is not None and incident.restart.max_s == summary.restarts[0].max_s
    assert summary.times is not None and summary.times.rework_s > 0.0
    assert summary.times.restart_s <= incident.restart.max_s + 0.01
    status = [sys.executable, "-m", "resilience.cli", "status", str(run), "--json"]
    shown = subprocess.run(status, capture_output=True, text=True, check=False)
    now = json.loads(shown.stdout)
    assert (now["restarts"], now["cycle"], now.get("iterations", 0)) == (1, 1, 0)


KILLED = """
import os, signal
from resilience.inprocess import Wrapper
from resilience.system import attempts

attempts.ALLOCATION_LIMIT = 3600.0  # nobody may have to wait for a process that is gone
allocate = attempts.allocate

def killed(root, job_id, wanted, least):
    allocate(root, job_id, wanted, least)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    attempts.allocate = killed

@Wrapper()
def train():
    pass

train()
"""


@pytest.mark.slow
def test_ranks_go_on_in_an_attempt_of_their_own_after_the_one_that_allocated_it_was_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KILLED)
    options = ["--nproc-per-node=2", "--max-restarts=1", f"--master-port={free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(tmp_path / "train.py")]
    runs = {"RESILIENCE_RUN_DIR": str(tmp_path / "runs"), "RESILIENCE_JOB_ID": "job"}
    env = dict(os.environ, **runs, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"job", "job@1"}
    started = [
        record for record in load(tmp_path / "runs" / "job@1").records if isinstance(record.event, events.CallStarted)
    ]
    assert {(record.origin.attempt, record.origin.cycle) for record in started} == {(1, 1)}
    assert {record.origin.initial_rank for record in started} == {0, 1}
