"""Several agents: what one node's failure, loss, request or bad health means for the others."""

from __future__ import annotations

import signal
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resilience.facts import events
from tests.process.launching import NO_NODE_IS_LOST, Launched, launcher
from tests.process.test_launcher_nodes import QUICK
from tests.support.ranks import Job

Launch = Callable[..., Launched]


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    """Start agents with one worker each."""

    begin = launcher(start, tmp_path)

    def nodes(script: str, *options: str, conf: str = NO_NODE_IS_LOST, **more: Any) -> Launched:
        script = "node = os.environ['RESILIENCE_NODE']\n" + textwrap.dedent(script)
        return begin(script, *options, nproc=1, conf=conf, **more)

    return nodes


def cycles(job: Launched, node: str) -> list[str]:
    """Why each cycle of a node began."""
    return [record.event.why for record in job.of(events.CycleStarted, node)]


# -- health -------------------------------------------------------------------------------------------


def test_unhealthy_node_runs_nothing_leaves_and_says_why(launch: Launch) -> None:
    job = launch("say('ran')", "--health-check", "echo the fan is broken; exit 3", nodes="1", agents=1)
    assert job.wait() == [95]
    (record,) = job.of(events.NodeUnhealthy)
    assert record.event.check == "command"
    assert "exited with 3" in record.event.detail and "the fan is broken" in record.event.detail
    assert not list(job.folder.glob("ran.*"))
    assert "the fan is broken" in job.output(stream=2)


def test_node_whose_health_check_does_not_end_within_its_limit_leaves(launch: Launch) -> None:
    hangs = ("--health-check", "exec sleep 600", "--health-check-timeout", "0.5")
    job = launch("say('ran')", *hangs, nodes="1", agents=1)
    assert job.wait() == [95]
    (record,) = job.of(events.NodeUnhealthy)
    assert (record.event.check, record.event.detail) == ("command", "no answer within 0.5 s")
    assert not list(job.folder.glob("ran.*"))


@pytest.mark.slow
def test_node_that_falls_ill_between_cycles_leaves_and_the_other_goes_on(launch: Launch, tmp_path: Path) -> None:
    job = launch(
        """
        await_all()
        if cycle == 0 and node == "node1":
            (here / "sick").touch()
            sys.exit(3)
        if cycle == 0:
            await_file("never")
        say(f"size{size}")
        """,
        "--health-check",
        f'test "$RESILIENCE_NODE" != node1 -o ! -e {tmp_path}/sick',
        nodes="1:2",
        agents=2,
    )
    assert job.wait() == [0, 95]
    assert cycles(job, "node0") == ["first", "failure"]
    assert (tmp_path / "size1.1.0").exists()
    assert [record.origin.node for record in job.of(events.NodeUnhealthy)] == ["node1"]


def test_node_whose_device_fails_while_workers_run_leaves_and_the_other_goes_on(launch: Launch, tmp_path: Path) -> None:
    job = launch(
        "say(f'size{size}')\nif cycle == 0: await_file('never')",
        *("--ft-node-health-check-interval", "0.05"),
        nodes="1:2",
        agents=2,
        per_agent=({}, {"SICK_DEVICE": str(tmp_path / "sick")}),
    )
    for rank in range(2):
        job.await_worker(f"size2.0.{rank}")
    (tmp_path / "sick").touch()
    assert job.wait() == [0, 95]
    assert cycles(job, "node0") == ["first", "request"]
    assert (tmp_path / "size1.1.0").exists()
    (told,) = job.of(events.NodeUnhealthy)
    assert (told.origin.node, told.event.check, told.event.detail) == ("node1", "gpu", "GPU 0: GPU is lost (15)")
    assert job.of(events.RestartDecided) == []  # costs no restart


# -- min-healthy --------------------------------------------------------------------------------------

MIN_HEALTHY = ("--ft-restart-policy", "min-healthy")


def test_min_healthy_goes_on_without_a_failed_worker(launch: Launch) -> None:
    job = launch("if rank == 1: sys.exit(5)\nawait_file('go')", *MIN_HEALTHY, nodes="2:3", agents=3)
    job.job.await_record(events.WorkerExited)
    (job.folder / "go").touch()
    assert job.wait() == [0, 0, 0]
    assert [cycles(job, f"node{number}") for number in range(3)] == [["first"]] * 3


def test_min_healthy_goes_on_without_a_lost_node(launch: Launch) -> None:
    job = launch("say(f'up {node}')\nawait_file('go')", *MIN_HEALTHY, nodes="2:3", agents=3, conf=QUICK)
    for number in range(3):
        job.job.await_sign_file(next_of(job, f"up node{number}.0."), 60.0)
    job.job.signal(2, signal.SIGKILL)
    (job.folder / "go").touch()
    assert [job.wait_agent(number).code for number in (0, 1)] == [0, 0]  # which waits until the third is known lost
    assert [cycles(job, node) for node in ("node0", "node1")] == [["first"], ["first"]]


@pytest.mark.slow
def test_min_healthy_names_what_brought_it_below_the_minimum(launch: Launch) -> None:
    script = """
    say(f"up {node}")
    if cycle == 0 and node == "node0":
        sys.exit(5)
    if cycle == 0:
        await_file("never")
    """
    job = launch(script, *MIN_HEALTHY, nodes="2:3", agents=3, conf=QUICK)
    job.await_record(events.WorkerExited, "node0")
    for number in (1, 2):
        job.job.await_sign_file(next_of(job, f"up node{number}.0."), 60.0)
    job.job.signal(2, signal.SIGKILL)
    assert [job.wait_agent(number).code for number in (0, 1)] == [0, 0]
    (decided,) = job.of(events.RestartDecided)
    assert decided.event.lost_node == "node2"


@pytest.mark.slow
def test_min_healthy_goes_on_without_two_nodes_of_which_one_watched_the_other(launch: Launch) -> None:
    job = launch("say(f'up {node}')\nawait_file('go')", *MIN_HEALTHY, nodes="2:4", agents=4, conf=QUICK)
    for number in range(4):
        job.job.await_sign_file(next_of(job, f"up node{number}.0."), 60.0)
    of_rank = {record.event.group_rank: record.origin.node for record in job.of(events.RendezvousCompleted)}
    host = next(rank for rank, node in of_rank.items() if node == "node0")  # of the job's store
    lost = [int(of_rank[(host + ahead) % 4].removeprefix("node")) for ahead in (2, 1)]
    for number in lost:
        job.job.signal(number, signal.SIGKILL)
    (job.folder / "go").touch()
    assert [job.wait_agent(number).code for number in {0, 1, 2, 3} - set(lost)] == [0, 0]  # once both are known lost


def test_min_healthy_restarts_below_the_minimum(launch: Launch) -> None:
    script = "await_all()\nif cycle == 0 and rank: sys.exit(5)\nif cycle == 0: await_file('never')"
    job = launch(script, *MIN_HEALTHY, nodes="2:3", agents=3)
    assert job.wait() == [0, 0, 0]
    assert [cycles(job, f"node{number}") for number in range(3)] == [["first", "failure"]] * 3
    assert job.of(events.RestartDecided)[0].event.restarts_used == 1


# -- the end ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_node_that_finishes_first_and_looks_seldom_has_completed_too(launch: Launch) -> None:
    """By then the other has seen that all are through, and has closed the rendezvous."""
    looks = ({"PET_MONITOR_INTERVAL": "0.02"}, {"PET_MONITOR_INTERVAL": "0.7"})
    # The pause is two looks of the other: with less, or on a slow machine, the test would only see less.
    job = launch("if node == 'node0': time.sleep(1.5)", nodes="2", agents=2, per_agent=looks)
    assert job.wait() == [0, 0]
    assert [record.event.outcome for record in job.of(events.JobEnded)] == ["completed", "completed"]


# -- requests -----------------------------------------------------------------------------------------

REQUEST = """
from resilience.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest

def ask(action):
    client = RankMonitorClient()
    client.init_workload_monitoring()
    client.send_workload_control_request(WorkloadControlRequest(WorkloadAction[action], "bad memory"))

await_all()
"""


def test_shutdown_stops_all_nodes_with_its_own_exit_code(launch: Launch) -> None:
    job = launch(REQUEST + "if node == 'node1': ask('ShutdownWorkload')\nawait_file('never')", nodes="2", agents=2)
    assert job.wait() == [94, 94]
    assert [cycles(job, f"node{number}") for number in range(2)] == [["first"], ["first"]]


def test_excluded_node_leaves_and_the_other_goes_on(launch: Launch) -> None:
    job = launch(
        REQUEST + "if cycle == 0 and node == 'node1': ask('ExcludeThisNode')\nif cycle == 0: await_file('never')",
        nodes="1:2",
        agents=2,
    )
    assert job.wait() == [0, 95]
    assert cycles(job, "node0") == ["first", "request"]
    assert cycles(job, "node1") == ["first"]
    assert job.of(events.RestartDecided) == []  # costs no restart


def test_continue_changes_nothing(launch: Launch) -> None:
    job = launch(REQUEST + "ask('Continue')", nodes="1", agents=1)
    assert job.wait() == [0]
    assert [record.event.action for record in job.of(events.ControlRequested)] == ["Continue"]


# -- group ranks --------------------------------------------------------------------------------------


def met(job: Launched) -> dict[str, tuple[int, str]]:
    return {
        record.origin.node: (record.event.group_rank, record.event.mode)
        for record in job.of(events.RendezvousCompleted)
    }


def test_group_ranks_are_the_infrastructures_where_it_gives_them_in_every_cycle(launch: Launch) -> None:
    job = launch(
        "say(node)\nif cycle == 0: sys.exit(rank)\n",
        nodes="2",
        agents=2,
        per_agent=({"SLURM_PROCID": "1", "GROUP_RANK": "0"}, {"SLURM_PROCID": "0", "GROUP_RANK": "1"}),
    )
    assert job.wait() == [0, 0]
    assert met(job) == {"node0": (1, "infrastructure"), "node1": (0, "infrastructure")}
    assert {path.name for path in job.folder.glob("node*.1.*")} == {"node0.1.1", "node1.1.0"}


@pytest.mark.slow
def test_given_group_ranks_are_ignored_with_no_ft_use_infra_group_rank(launch: Launch) -> None:
    given = ({"GROUP_RANK": "1"}, {"GROUP_RANK": "0"})
    job = launch("pass", "--no-ft-use-infra-group-rank", nodes="2", agents=2, per_agent=given)
    assert job.wait() == [0, 0]
    assert met(job) == {"node0": (0, "deterministic"), "node1": (1, "deterministic")}


def test_rank_that_is_asked_for_and_not_given_is_wrong_use(launch: Launch) -> None:
    job = launch("pass", "--ft-use-infra-group-rank", nodes="1", agents=1)
    assert job.wait() == [2]
    assert "neither SLURM_PROCID nor GROUP_RANK is set" in job.output(stream=2)


def next_of(job: Launched, prefix: str) -> Path:
    """Return the file with this prefix that a worker makes, whatever its rank."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        for path in job.folder.glob(f"{prefix}*"):
            return path
        time.sleep(0.01)
    raise AssertionError(f"no {prefix}{job.job.output()}")
