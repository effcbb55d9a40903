"""Who hosts the Wrapper's store, where, and what happens if nobody can."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from resilience.errors import StoreError
from resilience.facts import events
from resilience.inprocess._runtime.store_refusal import RefusedStore, raise_if_refused
from resilience.report.condensed import report
from resilience.run_folder.load import load
from resilience.system.descriptors import SPARE
from resilience.system.listening_sockets import listen
from tests.process.crowd import CONNECTIONS_A_RANK
from tests.support.ranks import Job, free_port
from tests.support.signs import await_true
from tests.support.stops import stop

Start = Callable[..., Job]
TARGET = "tests.process.hosted:restart_once"
RANKS_A_NODE = 8


@pytest.fixture
def agent() -> Iterator[dict[str, str]]:
    """A launcher's store, and the variables that say so."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = dist.TCPStore(
        "127.0.0.1", port, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False
    )
    yield {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "RESILIENCE_JOB_ID": "job"}
    del server


@pytest.fixture
def stranger() -> Iterator[int]:
    """A port that somebody else has."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def base_ports(job: Job) -> set[int]:
    """Return the ports on which stores of the Wrapper itself are hosted."""
    return {record.event.port for record in job.of(events.StoreHosted) if record.event.purpose == "wrapper"}


def assert_reported_and_gone(job: Job, *ranks: int) -> None:
    """The start that failed is one incident, which these ranks have recorded, and nothing of it still runs."""
    _, alive = psutil.wait_procs(job.left_behind(), 120.0)
    assert alive == []
    told = [record.origin.initial_rank for record in job.of(events.StoreLost)]
    assert sorted(told) == sorted(ranks)
    (incident,) = report(load(job.run)).incidents
    assert (incident.kind, incident.status) == ("store_lost", "ended")
    job.ran_to_its_end = True


def test_port_beside_the_agents_store_is_hosted_by_the_monitor_of_rank_0(start: Start, agent: dict[str, str]) -> None:
    port = free_port()
    job = start(3, TARGET, env=agent, port=port)
    assert [rank.value["iteration"] for rank in job.wait()] == [1] * 3
    assert base_ports(job) == {port}


def test_restart_completes_while_the_monitor_that_should_host_its_store_is_stopped(
    start: Start, agent: dict[str, str]
) -> None:
    job = start(2, "tests.process.jobs:wait_for_sign", env=agent)
    for rank in range(2):
        job.await_record(events.StageStarted, rank=rank, where=lambda event: event.stage == "run")
    monitor = job.monitor_pid(0)
    stop(monitor)
    try:
        (job.folder / "raise").touch()
        (job.folder / "go").touch()
        assert [rank.value for rank in job.wait_ranks()] == [1, 1], job.output()
    finally:
        os.kill(monitor, signal.SIGCONT)
    job.wait()


def test_store_of_a_rank_without_monitor_ignores_a_changed_master_addr(start: Start, agent: dict[str, str]) -> None:
    job = start(2, "tests.process.hosted:rank_0_changes_the_address", env=agent)
    job.await_sign("changed", rank=0)
    os.kill(job.monitor_pid(0), signal.SIGKILL)
    job.await_record(events.MonitorLost, rank=0)
    job.let_on("changed")
    assert [rank.value for rank in job.wait_ranks()] == ["127.0.0.1"] * 2, job.output()


def test_port_that_is_taken_beside_the_agents_store_gives_way_to_a_free_one(
    start: Start, agent: dict[str, str], stranger: int
) -> None:
    job = start(3, TARGET, env=agent, port=stranger)
    assert [rank.value["iteration"] for rank in job.wait()] == [1] * 3
    (port,) = base_ports(job)
    assert port != stranger


def test_monitor_that_cannot_host_beside_the_agents_store_tells_all_ranks_why(
    start: Start, agent: dict[str, str]
) -> None:
    job = start(2, TARGET, env=agent, port=free_port(), open_files=80)
    for rank in job.wait_ranks():
        assert rank.type == "StoreError", rank
        assert "host the stores of 2 ranks" in rank.error and "the limit is 80" in rank.error
    assert_reported_and_gone(job, 0, 1)


def test_monitor_that_cannot_host_in_a_plain_environment_tells_all_ranks_why(start: Start) -> None:
    job = start(3, TARGET, env={"RESILIENCE_JOB_ID": "job"}, port=free_port(), timeout=280.0, open_files=80)
    for rank in job.wait_ranks(150):  # `timeout` is longer
        assert rank.type == "StoreError", rank
        assert "host the stores of 3 ranks" in rank.error and "the limit is 80" in rank.error
    assert_reported_and_gone(job, 0, 1, 2)


SHORT_OF_FILES = """
import os, pathlib, psutil, resource, sys, time
from resilience.inprocess import CallWrapper, Wrapper

agent, is_lowered = psutil.Process(os.getppid()), pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    port = int(os.environ["MASTER_PORT"])
    (host,) = {
        process.pid
        for process in (agent, *agent.children())
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    }
    most = len(os.listdir(f"/proc/{host}/fd")) + 4  # and three connections of each rank are to come
    _, hard = resource.prlimit(host, resource.RLIMIT_NOFILE)
    resource.prlimit(host, resource.RLIMIT_NOFILE, (most, most if sys.argv[2] == "hard" else hard))
    is_lowered.touch()
while not is_lowered.exists():
    time.sleep(0.01)

@Wrapper()
def train(call: CallWrapper | None = None):
    if call.iteration == 0 and os.environ["RANK"] == "1":
        raise ValueError("by schedule")
    while call.iteration == 0:
        time.sleep(0.01)

train()
"""


@pytest.mark.parametrize(
    ("limit", "status", "words"),
    [pytest.param("soft", 0, "", marks=pytest.mark.slow), ("hard", 1, "has to host the store of 3 ranks and needs")],
)
@pytest.mark.parametrize(
    "launcher", [pytest.param("torch.distributed.run", marks=pytest.mark.slow), "resilience.launcher"]
)
def test_limit_of_open_files_of_the_process_that_hosts_a_launchers_store_is_raised_or_named(
    tmp_path: Path, launcher: str, limit: str, status: int, words: str
) -> None:
    (tmp_path / "script.py").write_text(SHORT_OF_FILES)
    options = ["--standalone", "--nproc-per-node=3", "--max-restarts=0"]
    command = [sys.executable, "-m", launcher, *options, "script.py"]
    env = dict(os.environ, RESILIENCE_RUN_DIR=str(tmp_path / "runs"), OMP_NUM_THREADS="1")
    with (tmp_path / "output").open("w+") as output:
        agent = subprocess.Popen(
            [*command, str(tmp_path / "lowered"), limit],
            env=env,
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            assert agent.wait(240) == status, (tmp_path / "output").read_text()
        finally:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
    assert words in (tmp_path / "output").read_text()


def test_reason_for_a_refused_store_is_served_until_ranks_have_read_it_not_only_their_monitors() -> None:
    refusal = RefusedStore(socket.create_server(("127.0.0.1", 0)), "127.0.0.1", 2, "too few descriptors")
    client = dist.TCPStore("127.0.0.1", refusal._store.port, wait_for_workers=False)
    for rank, is_read in ((None, False), (1, True)):
        with pytest.raises(StoreError, match="too few descriptors"):
            raise_if_refused(client, rank, 30.0)
        assert refusal.is_read() is is_read
    refusal.await_read()


def test_port_that_is_taken_in_a_plain_environment_is_named(start: Start, stranger: int) -> None:
    job = start(1, TARGET, env={"RESILIENCE_JOB_ID": "job"}, port=stranger)
    (rank,) = job.wait_ranks()
    assert rank.type == "StoreError"
    assert f"rank 0's monitor could not host the store at 127.0.0.1:{stranger}" in rank.error
    assert_reported_and_gone(job, 0)


@pytest.mark.parametrize("how", ["forked", "executed"])
def test_start_on_a_host_without_a_free_process_says_so_and_is_no_lost_store(start: Start, how: str) -> None:
    job = start(1, "tests.process.hosted:cannot_start_a_monitor", how=how)
    (rank,) = job.wait_ranks()
    assert rank.type == "MonitorError"
    assert "could not be started: BlockingIOError" in rank.error and "ulimit -u" in rank.error
    assert [record.event.error for record in job.of(events.CallEnded)] == [f"MonitorError: {rank.error}"[:500]]
    assert not job.of(events.StoreLost)
    assert report(load(job.run)).incidents == ()


@pytest.mark.parametrize("name", ["resilience-ticker", "resilience-supervisor"])
def test_thread_that_is_refused_for_a_moment_costs_neither_the_call_nor_the_watch(start: Start, name: str) -> None:
    job = start(1, "tests.process.hosted:thread_is_refused_once", name=name)
    assert [rank.value for rank in job.wait()] == [1], job.output()
    job.await_sign("refused", 0)
    assert not job.of(events.HookFailed) and not job.of(events.StoreLost)


def test_store_of_an_iteration_that_neither_monitor_nor_rank_can_host_is_on_record(start: Start) -> None:
    job = start(1, "tests.process.hosted:no_process_hosts_the_iterations_store")
    for role in ("monitor", "rank"):
        failed = job.await_record(events.HookFailed, rank=0, role=role)
        assert failed.event.hook == "hosting"
        assert "the store of iteration 0 could not be hosted: OSError: [Errno 24] Too many open" in failed.event.error
    job.signal(0, signal.SIGKILL)  # it waits for a store until barrier_timeout
    job.wait()
    assert not job.of(events.StoreLost)


def test_job_is_not_noted_as_without_a_store_because_a_last_hook_outlives_its_host(start: Start) -> None:
    job = start(2, "tests.process.hosted:hold_in_the_last_hook", env_of=lambda rank: {"RESILIENCE_NODE": f"node{rank}"})
    job.await_sign("hook", 1)
    assert job.wait_rank(0) is not None, job.output()
    job.await_record(events.MonitorEnded, rank=0, role="monitor")  # it has hosted the store
    job.let_on("hook")
    assert [rank.value for rank in job.wait()] == [1, 1]
    assert [record.event.outcome for record in job.of(events.CallEnded)] == ["completed"] * 2
    assert not job.of(events.StoreLost)


def test_start_without_a_host_says_what_was_tried_and_is_an_incident(start: Start) -> None:
    port = free_port()
    job = start(1, TARGET, env={"RANK": "1", "WORLD_SIZE": "2"}, port=port, timeout=0.5)
    (rank,) = job.wait_ranks()
    assert rank.type == "StoreError"
    for words in (f"127.0.0.1:{port}", "within 0.5 s", "rank 0's monitor should host it"):
        assert words in rank.error
    (record,) = job.of(events.StoreLost)
    assert record.origin.initial_rank == 1 and f"127.0.0.1:{port}" in record.event.error
    assert record.origin.job_id.startswith("unstarted-127.0.0.1-")
    assert_reported_and_gone(job, 1)


@pytest.mark.parametrize(
    ("barrier", "is_host_lost"), [pytest.param(30.0, False, marks=pytest.mark.slow), (3600.0, True)]
)
def test_monitor_that_finds_no_store_outlives_a_stopped_job_by_no_more_than_a_barrier(
    start: Start, barrier: float, is_host_lost: bool
) -> None:
    """It ends at once if the store that its rank used is gone, for then no rank waits for it."""
    job = start(2, "tests.process.hosted:monitor_finds_no_store", barrier=barrier)
    host, _ = (job.monitor_pid(rank) for rank in (0, 1))  # both calls have begun
    for rank in (0, 1):
        job.signal(rank, signal.SIGKILL)
    if is_host_lost:
        os.kill(host, signal.SIGKILL)
    job.wait_ranks()
    _, alive = psutil.wait_procs(job.left_behind(), 100.0)
    assert alive == []


def test_missing_store_address_error_names_the_launchers_store(start: Start, agent: dict[str, str]) -> None:
    job = start(1, TARGET, env={**agent, "RANK": "1", "WORLD_SIZE": "2"}, port=free_port(), timeout=0.5)
    (rank,) = job.wait_ranks()
    assert rank.type == "StoreError"
    assert "publish its address in the launcher's store at 127.0.0.1:" + agent["MASTER_PORT"] in rank.error
    assert_reported_and_gone(job, 1)


def test_hosting_monitor_raises_its_own_limit_and_not_its_ranks(start: Start, agent: dict[str, str]) -> None:
    job = start(2, TARGET, env=agent, port=free_port(), soft=64)
    assert [rank.value for rank in job.wait()] == [{"iteration": 1, "soft": 64}] * 2


# -- init_method="tcp://host:port" ---------------------------------------------------------------


def test_groups_that_name_a_place_by_url_meet_again_after_a_restart(start: Start, stranger: int) -> None:
    job = start(2, "tests.process.hosted:meet_by_url", port=stranger)
    assert [rank.value for rank in job.wait()] == [{"sum": 4, "is_as_before": True}] * 2


def test_group_of_some_ranks_that_names_a_place_by_url_is_hosted_by_its_rank_0(start: Start) -> None:
    job = start(3, "tests.process.hosted:some_meet_by_url", port=free_port())
    assert [rank.value for rank in job.wait()] == [2, 2, 1], job.output()


# -- many ranks ---------------------------------------------------------------------------------


def test_rank_of_a_real_job_has_no_more_connections_to_the_stores_than_a_virtual_one(start: Start) -> None:
    """Otherwise the number that 1,024 virtual ranks need would say nothing about real ones. One monitor of a node has
    another connection to the job's store, for the supervision of other nodes."""
    port = free_port()
    job = start(3, "tests.process.hosted:hold_after_a_restart", port=port)
    for rank in range(3):
        job.await_sign("again", rank)
    host = psutil.Process(job.monitor_pid(0))
    sockets = host.net_connections("tcp")
    ports = {each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN}
    pids = {rank: {job.monitor_pid(rank)} for rank in range(3)}
    for record in job.of(events.CallStarted):
        assert record.origin.initial_rank is not None
        pids[record.origin.initial_rank].add(record.origin.pid)

    def count(processes: Iterable[int], servers: Collection[int]) -> int:
        return sum(
            each.status == psutil.CONN_ESTABLISHED and each.raddr.port in servers
            for pid in processes
            for each in psutil.Process(pid).net_connections("tcp")
        )

    counts = {rank: count(pids[rank], ports) for rank in (1, 2)}

    def has_one_supervisor() -> bool:
        of_monitors = sorted(count([job.monitor_pid(rank)], [port]) for rank in range(3))
        return of_monitors == [of_monitors[0], of_monitors[0], of_monitors[0] + 1]

    await_true(has_one_supervisor)
    job.let_on("again")
    assert [rank.value for rank in job.wait()] == [1] * 3
    assert min(counts.values()) > 0 and max(counts.values()) <= CONNECTIONS_A_RANK, counts


@pytest.mark.parametrize(
    ("world_size", "processes", "soft"), [(64, 2, 256), pytest.param(1024, 4, 1024, marks=pytest.mark.slow)]
)
def test_all_connections_of_a_world_fit_one_hosting_process_whose_soft_limit_is_too_low(
    start: Start, world_size: int, processes: int, soft: int
) -> None:
    port = {"MASTER_PORT": str(free_port())}
    host = start(1, "tests.process.crowd:host", env=port, size=world_size, soft=soft)
    host.await_sign("hosted", 0)
    count = world_size // processes
    crowds = [
        start(1, "tests.process.crowd:ranks", env=port, size=world_size, first=first, count=count)
        for first in range(0, world_size, count)
    ]
    for crowd, first in zip(crowds, range(0, world_size, count), strict=True):
        crowd.await_sign("completed", first, limit=900.0)
    host.let_on("hosted")
    (hosted,) = host.wait_ranks()
    assert hosted.value is not None, host.output()
    host.let_on("completed")
    took = [rank for crowd in crowds for rank in crowd.wait_ranks(300.0)[0].value]
    assert {tuple(sorted(rank))[:3] for rank in took if "failed" not in rank} == {("completed", "connected", "entered")}
    last = {name: max(rank[name] for rank in took if name in rank) for name in took[0]}
    nodes = world_size // RANKS_A_NODE
    assert hosted.value["used"] - hosted.value["before"] <= CONNECTIONS_A_RANK * world_size + nodes + SPARE
    print(
        f"{world_size} ranks: {hosted.value['used']} descriptors ({hosted.value['before']} before), "
        f"limit {hosted.value['soft']} raised to {hosted.value['raised']}; barrier "
        f"{last['entered'] - last['connected']:.2f} s after the last connection, interruption of all "
        f"{last['interrupted'] - max(rank.get('failed', 0.0) for rank in took):.2f} s"
    )
