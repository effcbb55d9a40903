"""A start whose store cannot be hosted, under both launchers: it says what was tried, is one incident, and leaves no
process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from resilience.facts import events
from resilience.report.condensed import report
from resilience.run_folder.load import load
from tests.process.leftovers import left_after
from tests.support.account import Account
from tests.support.ranks import free_port
from tests.support.stops import kill

TRAIN = """
import resource, sys
from datetime import timedelta
from resilience.inprocess import Wrapper

{before}

@Wrapper(store_kwargs={{"timeout": timedelta(seconds=5), {store}}})
def train():
    raise AssertionError("it has started")

train()
"""
NOWHERE = "192.0.2.1"  # RFC 5737: an address for documentation, of no interface
LAUNCHERS = [
    pytest.param([sys.executable, "-m", "torch.distributed.run"], marks=pytest.mark.slow),
    [sys.executable, "-m", "resilience.cli", "run"],
]


def started(folder: Path, launcher: list[str], script: str) -> tuple[int, str]:
    """Run a script with two ranks in a session of its own. Return the launcher's exit status and all output."""
    (folder / "train.py").write_text(script)
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=0", "train.py"]
    env = dict(os.environ, RESILIENCE_RUN_DIR=str(folder / "runs"), OMP_NUM_THREADS="1")
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            [*launcher, *options], env=env, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(240)
            left = [each for each in psutil.process_iter() if of_session(each, process.pid)]
            _, alive = psutil.wait_procs(left, 60.0)
        finally:
            kill(each for each in psutil.process_iter() if of_session(each, process.pid))
    text = (folder / "output").read_text()
    assert alive == [], text
    return status, text


def of_session(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False


def assert_one_incident(runs: Path) -> None:
    assert not left_after(runs)  # who ends last writes last
    (run,) = [folder for folder in runs.iterdir() if (folder / "records").is_dir()]
    lost = {each.origin.initial_rank for each in Account(run).records() if isinstance(each.event, events.StoreLost)}
    assert lost
    (incident,) = report(load(run)).incidents
    assert (incident.verdict.what, incident.verdict.culprits, incident.status) == ("store_lost", (), "ended")


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=["torchrun", "resilience"])
def test_store_at_an_address_of_no_interface_is_named_and_one_incident(tmp_path: Path, launcher: list[str]) -> None:
    status, output = started(tmp_path, launcher, TRAIN.format(before="", store=f'"host_name": "{NOWHERE}"'))
    assert status != 0
    assert f"could not reach the store at {NOWHERE}:" in output and "the launcher's agent should host it" in output
    assert_one_incident(tmp_path / "runs")


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=["torchrun", "resilience"])
def test_monitor_that_cannot_host_the_store_says_why_and_is_one_incident(tmp_path: Path, launcher: list[str]) -> None:
    lowered = "resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))"
    script = TRAIN.format(before=lowered, store=f'"port": {free_port()}')
    status, output = started(tmp_path, launcher, script)
    assert status != 0
    assert "host the stores of 2 ranks" in output and "the limit is 80" in output
    assert_one_incident(tmp_path / "runs")
