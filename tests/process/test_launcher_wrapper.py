"""A Wrapper inside `resilience run`: who copes with what, and what the account says of it."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from resilience.facts import events
from resilience.report.condensed import report
from resilience.run_folder.load import load
from tests.process.launching import NO_NODE_IS_LOST, Launched, launcher
from tests.process.test_launcher_nodes import go, whys
from tests.support.agreement import assert_agree, assert_same_seconds
from tests.support.ranks import Job

Launch = Callable[..., Launched]

TRAIN = """
from datetime import timedelta
import resilience
from resilience.inprocess import CallWrapper, Wrapper

@Wrapper(
    soft_timeout=timedelta(seconds=30),
    hard_timeout=timedelta(seconds=60),
    last_call_wait=timedelta(seconds=2),
    monitor_process_interval=timedelta(seconds=0.1),
    monitor_thread_interval=timedelta(seconds=0.1),
    progress_watchdog_interval=timedelta(seconds=0.1),
)
def train(call: CallWrapper):
    say(f"iteration{call.iteration}.size{os.environ['WORLD_SIZE']}")
    misbehave(call.iteration)
    while not (here / "go").exists():
        resilience.heartbeat()
        time.sleep(0.005)

train()
"""
PLAIN = "def misbehave(iteration): pass\n" + TRAIN


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    return launcher(start, tmp_path)


def wait_for_all(job: Launched) -> list[int]:
    """Wait for all agents, and for the workers' monitors, which may write last. Return the agents' exit statuses."""
    ended = job.wait()
    assert not psutil.wait_procs(job.job.left_behind(), 120.0)[1]
    return ended


@pytest.mark.parametrize("is_late", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_killed_rank_shrinks_in_place_and_below_the_minimum_the_launcher_takes_over(
    launch: Launch, is_late: bool
) -> None:
    """is_late: the agent of the first one does not run until the second one is dead too, and so decides."""
    job = launch(PLAIN, "--ft-restart-policy", "min-healthy", nodes="2:3", agents=3, nproc=1, conf=NO_NODE_IS_LOST)
    for rank in range(3):
        job.await_worker(f"iteration0.size3.0.{rank}")
    if is_late:
        job.job.signal(2, signal.SIGSTOP)
    os.kill(job.worker_pid(2), signal.SIGKILL)
    for rank in range(2):
        job.await_worker(f"iteration1.size2.0.{rank}")
    os.kill(job.worker_pid(1), signal.SIGKILL)
    if is_late:
        job.await_record(events.WorkerExited, where=lambda event: event.worker_rank == 1)
        job.job.signal(2, signal.SIGCONT)
    for rank in range(3):
        job.await_worker(f"iteration0.size3.1.{rank}")
    go(job)
    assert wait_for_all(job) == [0, 0, 0]
    assert whys(job, 0, 1, 2) == [["first", "failure"]] * 3
    (decided,) = job.of(events.RestartDecided)
    assert decided.event.restarts_used == 1
    told = [(record.origin.layer, record.event.record.rank) for record in job.of(events.RankInterrupted)]
    assert {rank for layer, rank in told if layer == "launcher"} == {1, 2}
    found = report(load(job.job.run))
    assert [(each.verdict.first, each.kind) for each in found.incidents] == [(2, "terminated"), (1, "terminated")]
    assert_agree(list(load(job.job.run).records))
    assert_same_seconds(list(load(job.job.run).records))


def test_killed_rank_under_any_failed_is_one_incident_and_the_user_is_advised_in_one_line(launch: Launch) -> None:
    job = launch(PLAIN)
    for rank in range(2):
        job.await_worker(f"iteration0.size2.0.{rank}")
    os.kill(job.worker_pid(1), signal.SIGKILL)
    for rank in range(2):
        job.await_worker(f"iteration0.size2.1.{rank}")
    go(job)
    assert wait_for_all(job) == [0]
    said = job.output(stream=2)
    (line,) = [line for line in said.splitlines() if "--ft-restart-policy min-healthy" in line]
    assert "resilience: when a rank dies, this launcher starts all workers again" in line
    assert "only with one agent for each rank" in line  # both ranks are on one node
    assert "Warning" not in said
    assert [(told.origin.initial_rank, told.origin.cycle) for told in job.of(events.ConfigurationAdvised)] == [(0, 0)]
    assert [(each.verdict.first, each.kind) for each in report(load(job.job.run)).incidents] == [(1, "terminated")]


SAVES_ON_CTRL_C = """
def misbehave(iteration):
    try:
        while True:
            resilience.heartbeat()
            time.sleep(0.005)
    except KeyboardInterrupt:
        if rank: time.sleep(1.0)
        say(f"saved{iteration}")
        (here / "go").touch()
"""


@pytest.mark.parametrize("policy", ["min-healthy", pytest.param("any-failed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("script", [SAVES_ON_CTRL_C + TRAIN, PLAIN], ids=["saves and returns", "has no handler"])
def test_ctrl_c_reaches_the_wrapped_function_of_each_rank_and_is_a_preemption(
    launch: Launch, script: str, policy: str
) -> None:
    job = launch(script, "--ft-restart-policy", policy, "--shutdown-timeout", "600")
    for rank in range(2):
        job.await_worker(f"iteration0.size2.0.{rank}")
    job.job.signal(0, signal.SIGINT)
    assert wait_for_all(job) == [128 + signal.SIGINT]
    saved = {path.name for path in job.folder.glob("saved*")}
    assert saved == (set() if script == PLAIN else {"saved0.0.0", "saved0.0.1"})
    (ended,) = job.of(events.JobEnded)
    assert (ended.event.outcome, ended.event.is_clean) == ("preempted", script != PLAIN)
    assert all(record.event.expected for record in job.of(events.WorkerExited))
    assert report(load(job.job.run)).incidents == ()
    assert_agree(list(load(job.job.run).records))


INTERRUPTED_IN_A_SECTION = """
from resilience.fault_tolerance import RankMonitorClient
client = RankMonitorClient()

def meet(name):
    say(name)
    for each in range(size):
        await_file(f"{name}.{cycle}.{each}")

def misbehave(iteration):
    if iteration == 0:
        meet("here")  # from here on limits hold, also while one waits for the other
        client.init_workload_monitoring()
        client.send_heartbeat()
        client.start_section("step")
        meet("announced")  # an interruption that comes earlier would leave nothing behind
        raise ValueError("bad batch")
    until = time.monotonic() + 18.0
    while time.monotonic() < until:
        time.sleep(0.01)
    client.start_section("step")
    client.end_section("step")
    client.shutdown_workload_monitoring()
    say("healthy")
"""


def test_section_and_heartbeats_that_an_exception_interrupted_do_not_end_the_healthy_rank(launch: Launch) -> None:
    limits = ("--ft-rank-section-timeouts", "step:15", "--ft-rank-heartbeat-timeout", "15")
    job = launch(INTERRUPTED_IN_A_SECTION + TRAIN, *limits, "--ft-initial-rank-heartbeat-timeout", "15")
    for rank in range(2):
        job.await_worker(f"healthy.0.{rank}")
    go(job)
    assert job.wait() == [0]
    assert job.of(events.RankFellSilent) == []


SILENT_WITHOUT_FAULT = """
from datetime import timedelta
from resilience.fault_tolerance import RankMonitorClient
from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess.rank_filter import MaxActiveWorldSize
client = RankMonitorClient()
client.init_workload_monitoring()

@Wrapper(rank_filter=MaxActiveWorldSize(ACTIVE), monitor_process_interval=timedelta(seconds=0.1))
def train(call: CallWrapper):
    for _ in range(360 if call.state.rank == 0 else 1):
        client.send_heartbeat()
        time.sleep(0.05)

train()
client.send_heartbeat()
"""


@pytest.mark.parametrize("active", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rank_that_waits_for_the_others_owes_no_heartbeats(launch: Launch, active: int) -> None:
    """A spare waits for the active rank; with two active ranks, the one that has returned waits for the other one."""
    limits = ("--ft-initial-rank-heartbeat-timeout", "15", "--ft-rank-heartbeat-timeout", "15")
    job = launch(SILENT_WITHOUT_FAULT.replace("ACTIVE", str(active)), *limits)
    assert job.wait() == [0]
    assert job.of(events.RankFellSilent) == []


def test_limits_of_the_launcher_that_are_shorter_than_the_wrappers_are_reported(launch: Launch) -> None:
    job = launch(PLAIN, "--ft-restart-policy", "min-healthy", "--ft-rank-heartbeat-timeout", "59")
    go(job)
    assert job.wait() == [0]
    said = job.output(stream=2)
    (line,) = [line for line in said.splitlines() if "kills a rank after 59 s of silence" in line]
    assert "the Wrapper may restart it until 60 s" in line


def test_no_advice_is_given_if_limits_of_launcher_and_wrapper_agree(launch: Launch) -> None:
    job = launch(PLAIN, "--ft-restart-policy", "min-healthy", "--ft-rank-heartbeat-timeout", "60")
    go(job)
    assert job.wait() == [0]
    assert not job.of(events.ConfigurationAdvised)
    assert "resilience: " not in job.output(stream=2)


@pytest.mark.parametrize(
    ("policy", "whole"), [pytest.param("min-healthy", False, marks=pytest.mark.slow), ("any-failed", True)]
)
def test_rank_that_a_wrapper_ends_is_no_preemption(launch: Launch, policy: str, whole: bool) -> None:
    hanging = """
    def misbehave(iteration):
        if cycle == 0 and rank == 1:
            import ctypes
            say("hangs")
            library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
            for _ in range(2):
                library.pthread_mutex_lock(mutex)  # the second never returns, keeps the interpreter, heeds no signal

    """
    script = textwrap.dedent(hanging) + TRAIN.replace("seconds=30", "seconds=4").replace("seconds=60", "seconds=8")
    job = launch(script, "--ft-restart-policy", policy, nodes="1:2", agents=2, nproc=1, conf=NO_NODE_IS_LOST)
    if whole:
        job.await_worker("iteration0.size2.1.1")
    else:  # rank 0 may have stood still itself, and be in a later iteration
        until = time.monotonic() + 120
        while not list(job.folder.glob("iteration*.size1.0.0")):
            assert time.monotonic() < until, job.job.output()
            time.sleep(0.01)
    go(job)
    assert job.wait() == [0, 0]
    assert whys(job, 0, 1) == [["first", "failure"] if whole else ["first"]] * 2
    assert job.of(events.StopRequested) == []


@pytest.mark.parametrize(("job_id", "folder"), [("../../escaped", "%2E.%2F..%2Fescaped"), ("team/job7", "team%2Fjob7")])
def test_id_of_any_text_names_a_folder_within_the_run_directory(
    launch: Launch, tmp_path: Path, job_id: str, folder: str
) -> None:
    job = launch(PLAIN, "--rdzv-id", job_id, nodes="2", agents=2, nproc=1, RESILIENCE_JOB_ID="")
    go(job)
    assert wait_for_all(job) == [0, 0]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [folder]
    run = load(tmp_path / "runs" / folder)
    assert run.job is not None and run.job.job_id == job_id
    assert {record.origin.job_id for record in run.records} == {job_id}
    wrapped = {record.origin.initial_rank for record in run.records if isinstance(record.event, events.CallStarted)}
    assert wrapped == {0, 1}
