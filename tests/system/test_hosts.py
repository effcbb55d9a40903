"""Three hosts, each a network namespace with an address, a name and a line that can be cut; one agent a host.

What fails is the network, or a host as a whole. The clock is one for all, so that records tell what overlapped."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilience.attribution.incident import Incident
from resilience.facts import events
from resilience.report.condensed import report
from resilience.run_folder.load import load
from tests.process.launching import Launched, launcher
from tests.process.test_launcher import await_end
from tests.process.test_launcher_nodes import has_ended, whys
from tests.support.hosts import Hosts, hosts, missing
from tests.support.pids import child_named
from tests.support.ranks import Job
from tests.system.jobs import RESULT

pytestmark = pytest.mark.slow

Launch = Callable[..., Launched]
CONF = "keep_alive_interval=0.25,keep_alive_max_attempt=8,last_call_timeout=20"  # lost after 2 s of silence
LOST_AFTER_16_S = CONF.replace("0.25", "2")  # after 16 s
WORK = """
say("up")
while not (here / "go").exists():
    with (here / f"work.{os.environ['RESILIENCE_NODE']}").open("a") as file:
        print(cycle, time.monotonic_ns(), file=file)
    time.sleep(0.01)
"""


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Hosts]:
    if why := missing():
        pytest.skip(why)
    with hosts(3, tmp_path) as made:
        yield made


@pytest.fixture
def launch(three: Hosts, start: Callable[..., Job], tmp_path: Path) -> Launch:
    begin = launcher(start, tmp_path)

    def nodes(script: str = WORK, *options: str, nodes: str = "2:3", agents: int = 3, **more: str) -> Launched:
        port = three[0].free_port()
        return begin(
            script,
            *options,
            nodes=nodes,
            agents=agents,
            nproc=1,
            conf=more.pop("conf", CONF),
            endpoint=f"{three[0].name}:{port}",
            per_agent=tuple(host.env for host in three.all),
            **more,
        )

    return nodes


def go(job: Launched) -> None:
    (job.folder / "go").touch()


def up(job: Launched, cycle: int, size: int) -> None:
    """Wait until all workers of a cycle are at work."""
    for rank in range(size):
        job.await_worker(f"up.{cycle}.{rank}", limit=120.0)


def at_work(job: Launched, node: int, cycle: int) -> list[int]:
    """When the worker of this node was at work in this cycle, nanoseconds of the one clock."""
    lines = (job.folder / f"work.node{node}").read_text().splitlines()
    return [int(at) for number, at in (line.split() for line in lines) if int(number) == cycle]


def rank_of(job: Launched, node: int) -> int:
    """The rank of this node's worker in the first cycle."""
    return int(job.of(events.RendezvousCompleted, f"node{node}")[0].event.group_rank)


def decisions(job: Launched) -> list[tuple[str, str]]:
    return [(record.event.verdict, record.event.why) for record in job.of(events.RestartDecided)]


def only_incident(job: Launched) -> Incident:
    (incident,) = report(load(job.job.run)).incidents
    return incident


def assert_lost(job: Launched, node: int) -> None:
    """The account blames the loss of this node, and it alone, and the others went on without it."""
    assert decisions(job) == [("restart", f"node node{node} is lost")]
    incident, rank = only_incident(job), rank_of(job, node)
    assert (incident.verdict.what, incident.category) == ("node_lost", "host")
    assert [culprit.rank for culprit in incident.verdict.culprits] == [rank]
    assert incident.excluded == (rank,)
    assert f"node node{node} left behind" in incident.actions


def assert_store_lost(job: Launched) -> None:
    """The account says that the store was lost, and blames no rank."""
    verdict = only_incident(job).verdict
    assert (verdict.what, verdict.culprits) == ("store_lost", ())


def cut_off(three: Hosts, node: int) -> str:
    """What a node says that got no answer from the store, which the first host has."""
    return f"node node{node} could not reach the job's store at {three[0].address}:"


LATE = ": it did not answer for 1.5 s"


# -- a node is lost -----------------------------------------------------------------------------------


def test_power_loss_of_a_host_is_noticed_and_the_others_go_on(launch: Launch, three: Hosts) -> None:
    job = launch()
    up(job, 0, 3)
    three[2].lose()
    up(job, 1, 2)
    go(job)
    assert job.wait() == [0, 0, -signal.SIGKILL]
    assert whys(job, 0, 1, 2) == [["first", "failure"], ["first", "failure"], ["first"]]
    assert_lost(job, 2)


def test_spare_takes_the_place_of_a_lost_host(launch: Launch, three: Hosts) -> None:
    job = launch(nodes="2")
    up(job, 0, 2)
    seated = [number for number in range(3) if job.of(events.CycleStarted, f"node{number}")]
    (spare,) = {0, 1, 2} - set(seated)
    lost = max(seated)
    three[lost].lose()
    up(job, 1, 2)
    go(job)
    assert job.wait() == [-signal.SIGKILL if number == lost else 0 for number in range(3)]
    assert whys(job, spare) == [["first"]]
    assert_lost(job, lost)


# -- a node is frozen (F11) ---------------------------------------------------------------------------


def test_frozen_host_is_lost_and_has_no_say_when_it_thaws(launch: Launch, three: Hosts) -> None:
    job = launch()
    up(job, 0, 3)
    old = job.worker_pid(rank_of(job, 2))
    assert {old, job.job.pids[2]} <= set(three[2].signal(signal.SIGSTOP))
    up(job, 1, 2)
    three[2].signal(signal.SIGCONT)
    await_end(old)
    up(job, 2, 3)  # it comes as a newcomer
    go(job)
    assert job.wait() == [0, 0, 0]
    assert whys(job, 0, 1, 2) == [["first", "failure", "membership"]] * 2 + [["first", "failure"]]
    assert [record.origin.cycle for record in job.of(events.CycleStarted, "node2")] == [0, 2]
    (ended, _) = job.of(events.CycleEnded, "node2")
    assert ended.event.detail == "node node2 is lost"  # what the others had said stands
    assert "node2" not in [record.origin.node for record in job.of(events.RestartDecided)]
    assert_lost(job, 2)


def test_frozen_host_of_the_store_ends_the_others_and_waits_for_them_in_vain(launch: Launch, three: Hosts) -> None:
    job = launch(WORK, "--join-timeout", "4")
    up(job, 0, 3)
    three[0].signal(signal.SIGSTOP)
    assert [job.wait_agent(number).code for number in (1, 2)] == [1, 1]
    three[0].signal(signal.SIGCONT)
    assert job.wait() == [1, 1, 1]
    assert all(cut_off(three, number) in job.output(number, 2) for number in (1, 2))
    assert all(LATE in job.output(number, 2) for number in (1, 2))
    assert "found no place within 4 s (join_timeout)" in job.output(0, 2)
    assert_store_lost(job)


# -- the network is partitioned (F27) -----------------------------------------------------------------


def test_host_that_is_cut_off_has_ended_before_the_others_go_on_and_comes_back(launch: Launch, three: Hosts) -> None:
    job = launch()
    up(job, 0, 3)
    three[2].cut()
    up(job, 1, 2)
    assert job.wait_agent(2).code == 1
    three[2].heal()
    back = job.again(2)
    up(job, 2, 3)
    go(job)
    assert back.wait() == [0]
    assert job.wait() == [0, 0, 1]
    assert max(at_work(job, 2, 0)) < min(at_work(job, 0, 1))  # never two rounds at once
    assert cut_off(three, 2) in job.output(2, 2) and LATE in job.output(2, 2)
    assert not any("store was lost" in job.output(number, 2) for number in range(3))
    (lost,) = job.of(events.StoreLost)
    assert (lost.origin.node, lost.event.error.startswith(cut_off(three, 2))) == ("node2", True)
    assert whys(job, 0, 1, 2) == [["first", "failure", "membership"]] * 2 + [["first", "first"]]
    assert_lost(job, 2)


def test_cut_that_heals_in_time_is_nothing(launch: Launch, three: Hosts) -> None:
    job = launch(conf=LOST_AFTER_16_S)
    up(job, 0, 3)
    three[2].cut()
    before = len(at_work(job, 2, 0))
    while len(at_work(job, 2, 0)) < before + 200:  # two seconds and more
        time.sleep(0.05)
    three[2].heal()
    go(job)
    assert job.wait() == [0, 0, 0]
    assert decisions(job) == []


def test_side_of_the_store_goes_on_alone_where_that_is_enough(launch: Launch, three: Hosts) -> None:
    job = launch(nodes="1:3")
    up(job, 0, 3)
    three[0].cut()
    assert [job.wait_agent(number).code for number in (1, 2)] == [1, 1]
    up(job, 1, 1)
    go(job)
    assert job.wait() == [0, 1, 1]
    assert max(at_work(job, 1, 0) + at_work(job, 2, 0)) < min(at_work(job, 0, 1))
    assert_store_lost(job)
    assert "the launcher: completed, exit status 0" in report(load(job.job.run)).end


def test_side_of_the_store_that_is_too_small_ends_too(launch: Launch, three: Hosts) -> None:
    job = launch(WORK, "--join-timeout", "5")
    up(job, 0, 3)
    three[0].cut()
    assert job.wait() == [1, 1, 1]
    assert whys(job, 0, 1, 2) == [["first"]] * 3
    assert_store_lost(job)


# -- ranks that do not reach each other (F29) ---------------------------------------------------------

REDUCE = """
import torch
import torch.distributed as dist
from resilience.fault_tolerance import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
dist.init_process_group("gloo")
say("up")
while True:
    is_over = torch.tensor([float((here / "go").exists())])
    dist.all_reduce(is_over)
    if is_over:
        break
    client.send_heartbeat()
    time.sleep(0.02)
"""


def test_collective_waiting_for_a_cut_off_host_does_not_block_the_others(launch: Launch, three: Hosts) -> None:
    job = launch(REDUCE)
    up(job, 0, 3)
    three[2].cut()
    up(job, 1, 2)
    go(job)
    assert job.wait() == [0, 0, 1]
    assert_lost(job, 2)


def test_two_ranks_that_do_not_reach_each_other_are_found_by_their_limits(launch: Launch, three: Hosts) -> None:
    limits = ("--ft-rank-heartbeat-timeout", "8", "--ft-initial-rank-heartbeat-timeout", "120")
    job = launch(REDUCE, *limits, nodes="3", conf=LOST_AFTER_16_S)
    up(job, 0, 3)
    three[1].cut_from(three[2])
    job.await_record(events.RestartDecided)
    three[1].heal_to(three[2])
    up(job, 1, 3)
    go(job)
    assert job.wait() == [0, 0, 0]
    assert whys(job, 0, 1, 2) == [["first", "failure"]] * 3


# -- the store, and the host that has it, are lost (F23) ----------------------------------------------


def store_pid(job: Launched) -> int:
    """Return the pid of the first agent's store process."""
    return int(child_named(job.job.pids[0], "res-store").pid)


def test_store_process_that_is_killed_ends_the_job_everywhere(launch: Launch, three: Hosts) -> None:
    job = launch()
    up(job, 0, 3)
    os.kill(store_pid(job), signal.SIGKILL)
    assert job.wait() == [1, 1, 1]
    assert f"the job's store at {three[0].address}:" in job.output(0, 2) and "is lost: " in job.output(0, 2)
    assert all(cut_off(three, number) in job.output(number, 2) for number in (1, 2))
    assert_store_lost(job)


def test_loss_of_the_host_of_the_store_ends_the_others(launch: Launch, three: Hosts) -> None:
    job = launch()
    up(job, 0, 3)
    three[0].lose()
    assert job.wait() == [-signal.SIGKILL, 1, 1]
    assert all(cut_off(three, number) in job.output(number, 2) for number in (1, 2))
    assert all(LATE in job.output(number, 2) for number in (1, 2))
    assert_store_lost(job)


# -- names are not found (F32) ------------------------------------------------------------------------

CONNECT = """
import torch.distributed as dist
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
store.set(f"here/{rank}", "1")
say("up")
await_file("go" if cycle else "fail")
sys.exit(0 if cycle else 3)
"""


def test_name_service_that_fails_later_is_not_missed(launch: Launch, three: Hosts) -> None:
    job = launch(CONNECT, nodes="3", conf=LOST_AFTER_16_S)
    up(job, 0, 3)
    three.know_names(False)
    (job.folder / "fail").touch()
    up(job, 1, 3)
    go(job)
    assert job.wait() == [0, 0, 0]


def test_name_service_that_comes_late_is_waited_for(launch: Launch, three: Hosts) -> None:
    three.know_names(False)
    job = launch(conf=LOST_AFTER_16_S)
    for number in (1, 2):
        assert not has_ended(job, number)
    three.know_names()
    up(job, 0, 3)
    go(job)
    assert job.wait() == [0, 0, 0]


# -- a Wrapper without the launcher -------------------------------------------------------------------


def test_wrapper_over_two_hosts_is_served_on_the_address_that_peers_use(
    three: Hosts, start: Callable[..., Job]
) -> None:
    port = str(three[0].free_port())
    job = start(
        2,
        "tests.system.jobs:train_and_hold",
        env={"MASTER_ADDR": three[0].name, "MASTER_PORT": port, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        env_of=lambda rank: three[rank].env,
        at="mid",
        step_held=5,
    )
    for rank in range(2):
        job.await_sign("mid", rank)
    lines = Path(f"/proc/{job.monitor_pid(0)}/net/tcp").read_text().splitlines()[1:]  # of the whole host
    listening = [line.split()[1].partition(":")[0] for line in lines if line.split()[3] == "0A"]
    addresses = {socket.inet_ntoa(bytes.fromhex(text)[::-1]) for text in listening}
    job.let_on("mid")
    assert [rank.value for rank in job.wait()] == [RESULT] * 2
    assert addresses == {three[0].address}
