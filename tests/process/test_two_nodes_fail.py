"""Workers of two nodes fail at the same moment: one restart, and one first interruption, in every view."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.attribution.incidents import incidents_of
from resilience.history.history import History
from resilience.status.state import Watcher
from tests.process.launching import NO_NODE_IS_LOST, Launched, launcher
from tests.process.test_launcher_nodes import go
from tests.process.test_launcher_wrapper import TRAIN, wait_for_all
from tests.support.agreement import INTERRUPTIONS, assert_agree, counted
from tests.support.ranks import Job

Launch = Callable[..., Launched]

RAISES = 'raise ValueError(f"bad {rank}")'
DIES = "os.kill(os.getpid(), signal.SIGKILL)"
SCRIPT = """
if cycle == 0:
    say("up")
    await_file("fault")
    {fault}
await_file("go")
"""
WRAPPED = """
def misbehave(iteration):
    if cycle == 0 and iteration == 0:
        say("up")
        await_file("fault")
        {fault}

"""


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    return launcher(start, tmp_path)


@pytest.mark.parametrize("fault", [RAISES, pytest.param(DIES, marks=pytest.mark.slow)])
def test_fault_of_two_nodes_at_once_is_one_restart_by_the_launcher_in_every_view(launch: Launch, fault: str) -> None:
    job = launch(SCRIPT.format(fault=fault), nodes="2", agents=2, nproc=1, conf=NO_NODE_IS_LOST)
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    (job.folder / "fault").touch()
    for rank in range(2):
        job.worker_pid(rank, 1)
    go(job)
    assert job.wait() == [0, 0]
    _assert_one_restart(job, "launcher", 2)


def test_errors_of_two_nodes_at_once_are_one_restart_in_place_in_every_view(launch: Launch) -> None:
    policy = ("--ft-restart-policy", "min-healthy")
    job = launch(
        WRAPPED.format(fault=f"if rank: {RAISES}") + TRAIN, *policy, nodes="3", agents=3, nproc=1, conf=NO_NODE_IS_LOST
    )
    for rank in range(3):
        job.await_worker(f"up.0.{rank}")
    (job.folder / "fault").touch()
    for rank in range(3):
        job.await_worker(f"iteration1.size3.0.{rank}")
    go(job)
    assert wait_for_all(job) == [0, 0, 0]
    _assert_one_restart(job, "inprocess", 3)


def _assert_one_restart(job: Launched, layer: str, nodes: int) -> None:
    """nodes: that counted the restart."""
    records = job.account.records()
    metrics = counted(records)
    (incident,) = incidents_of(History().take_all(records))
    assert (incident.layer, incident.status) == (layer, "restarted")
    firsts = {labels: n for labels, n in metrics.items() if labels[0] == INTERRUPTIONS and labels[-1] == "first"}
    assert sum(firsts.values()) == 1, firsts
    # Each node counts all restarts, and the dashboards take the largest count of them.
    assert metrics["resilience_restart_iterations_total", layer, "interrupted"] == nodes
    now = Watcher(job.account.folder).look()
    assert now is not None
    assert (now.restarts, now.iterations) == ((1, 0) if layer == "launcher" else (0, 1))
    assert_agree(records)
