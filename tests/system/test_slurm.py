"""A real Slurm runs the example: agents are its tasks, a node is lost, the job goes on; it stops in good order."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.facts import events
from tests.support.account import Account
from tests.support.server import ROOT
from tests.system import slurm
from tests.system.slurm import Slurm

EXAMPLE = Path(ROOT) / "examples" / "slurm"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm.missing()), reason=f"needs slurm-wlm and munge: no {', '.join(slurm.missing())}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="starts Slurm's daemons, which needs root"),
]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Slurm]:
    with slurm.cluster(tmp_path, 2) as running:
        yield running


def submit(cluster: Slurm, steps: int, step_time: float) -> tuple[int, Account]:
    folder = cluster.folder
    env = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RESILIENCE_RUN_DIR": str(folder / "runs"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    job = cluster.submit(
        f"--output={folder / 'output'}",
        f"--chdir={folder}",
        str(EXAMPLE / "job.sbatch"),
        str(EXAMPLE / "train.py"),
        f"--steps={steps}",
        f"--step-time={step_time}",
        f"--checkpoint={folder / 'model.pt'}",
        env=env,
    )
    return job, Account(folder / "runs" / str(job))


def await_file(path: Path, limit: float = 90.0) -> None:
    deadline = time.monotonic() + limit
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name} within {limit:g} s: {(path.parent / 'output').read_text()}"
        time.sleep(0.05)


def agents(account: Account) -> dict[str, int]:
    """Return the agents' pids by node."""
    return {record.origin.node: record.origin.pid for record in account.records() if record.origin.role == "agent"}


def place(pid: int) -> int:
    """Return a task's place in its job."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return int(next(value for value in variables if value.startswith(b"SLURM_PROCID=")).partition(b"=")[2])


def test_job_completes_on_two_nodes(two: Slurm) -> None:
    job, account = submit(two, steps=20, step_time=0.0)
    two.await_state(job, "COMPLETED", "FAILED")
    output = (two.folder / "output").read_text()
    assert two.state(job) == "COMPLETED", output
    assert "rank 3 of 4 starts at step 0" in output
    assert "done: loss" in output
    assert len(agents(account)) == 2


def test_lost_node_is_done_without(two: Slurm) -> None:
    job, account = submit(two, steps=300, step_time=0.05)
    await_file(two.folder / "model.pt")
    (second,) = [pid for pid in agents(account).values() if place(pid) == 1]
    os.kill(second, signal.SIGKILL)  # its monitors end its workers
    two.await_state(job, "COMPLETED", "FAILED", "NODE_FAIL", limit=180.0)
    output = (two.folder / "output").read_text()
    # The state follows the status of the script, which is 0 if one task has 0: the killed agent's task has 137.
    assert two.state(job) == "COMPLETED", output
    assert "rank 1 of 2 starts at step" in output
    assert "done: loss" in output


def test_scancel_gives_all_ranks_time_for_a_checkpoint(two: Slurm) -> None:
    job, account = submit(two, steps=100_000, step_time=0.02)
    await_file(two.folder / "model.pt")
    two.ask("scancel", "--signal=TERM", str(job))
    two.await_state(job, "COMPLETED", "FAILED", "CANCELLED", limit=90.0)
    output = (two.folder / "output").read_text()
    assert output.count("stops after step") == 4
    ended = [record.event.outcome for record in account.records() if isinstance(record.event, events.JobEnded)]
    assert ended == ["preempted", "preempted"]
