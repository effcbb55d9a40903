"""A worker that SIGKILL does not end: it waits in the kernel, as for a driver or a file server that has failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.facts import events
from tests.process.launching import NO_NODE_IS_LOST, Launched, launcher
from tests.process.test_launcher_nodes import outcomes, whys
from tests.support.ranks import Job
from tests.support.stuck import missing, silent

STUCK = """
from resilience.fault_tolerance import RankMonitorClient
node = os.environ["RESILIENCE_NODE"]
if node == "node1":
    client = RankMonitorClient()
    client.init_workload_monitoring()
    client.send_heartbeat()
    (here / "asks").touch()
    os.stat(here / "silent" / "file")
elif cycle == 0:
    await_file("fail")
    sys.exit(3)
say("again")
await_file("go")
"""


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Callable[..., Launched]:
    if why := missing():
        pytest.skip(why)
    begin = launcher(start, tmp_path)

    def two(*options: str, script: str = STUCK, **env: str) -> Launched:
        options = ("--shutdown-timeout", "1", *options)
        return begin(script, *options, nodes="1:2", agents=2, nproc=1, conf=NO_NODE_IS_LOST, **env)

    return two


def wait_for_the_rest(job: Launched, pid: int) -> None:
    """Wait until the node with the stuck worker has left, and the other one is at work again; let it end."""
    job.await_worker("again.1.0")
    assert Path(f"/proc/{pid}").exists()
    assert job.wait_agent(1).code == 95
    (job.folder / "go").touch()
    assert job.wait_agent(0).code == 0
    assert whys(job, 0, 1) == [["first", "failure"], ["first"]]
    assert outcomes(job) == {"node0": ("completed", 0), "node1": ("excluded", 95)}
    (told,) = job.of(events.NodeUnhealthy)
    assert told.origin.node == "node1" and told.event.check == "processes"
    assert f"(pid {pid}) cannot be killed, not even by SIGKILL: state D" in told.event.detail
    assert pid not in [record.event.worker_pid for record in job.of(events.WorkerExited)]


def test_worker_that_cannot_be_stopped_is_left_behind_and_its_node_leaves(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    with silent(tmp_path / "silent"):
        job = launch()
        pid = job.await_record(events.WorkerStarted, "node1").event.worker_pid
        job.job.await_sign_file(job.folder / "asks")
        (job.folder / "fail").touch()
        wait_for_the_rest(job, pid)
    job.wait()


def test_hung_unkillable_worker_does_not_block_the_other_node(launch: Callable[..., Launched], tmp_path: Path) -> None:
    with silent(tmp_path / "silent"):
        job = launch("--ft-rank-heartbeat-timeout", "1")
        pid = job.await_record(events.WorkerStarted, "node1").event.worker_pid
        wait_for_the_rest(job, pid)
    job.wait()


def test_worker_that_waits_in_the_kernel_for_torchs_limit_is_killed_and_its_node_leaves(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """It sends no signal of progress, so no other limit applies."""
    # FUSE waits in state S until a signal comes.
    alarm = "    signal.signal(signal.SIGALRM, lambda *_: None)\n    signal.alarm(1)\n"
    script = STUCK.replace("    client.send_heartbeat()\n", alarm)
    with silent(tmp_path / "silent"):
        job = launch(script=script, TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT="1")
        pid = job.await_record(events.WorkerStarted, "node1").event.worker_pid
        wait_for_the_rest(job, pid)
        warnings = [record.event for record in job.of(events.NodeWarned) if record.event.check == "processes"]
        assert [f"process {pid} is killed: in an uninterruptible wait" in event.detail for event in warnings] == [True]
    job.wait()
