"""Each launch of a job has a folder of its own, and nothing in the folder of another launch is changed."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.facts import events
from resilience.report.condensed import report
from resilience.run_folder.load import load
from tests.process.launching import Launched, launcher
from tests.support.account import Account
from tests.support.ranks import Job, free_port

Launch = Callable[..., Launched]
Start = Callable[..., Job]
WRAPPED = "tests.process.hosted:restart_once"


@pytest.fixture
def launch(start: Start, tmp_path: Path) -> Launch:
    return launcher(start, tmp_path)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def attempts_in(folder: Path) -> set[int]:
    """Return the attempts that a run folder's records name."""
    return {record.origin.attempt for record in load(folder).records}


def test_second_launch_of_a_job_leaves_the_first_ones_folder_as_it_was(launch: Launch, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert launch("print('first')").wait() == [0]
    before = content(runs / "job")
    assert before["output/0/0.out"] == b"first\n"
    assert launch("print('second')", SLURM_RESTART_COUNT="0").wait() == [0]
    assert content(runs / "job") == before
    assert {path.name for path in runs.iterdir()} == {"job", "job@1"}
    assert (runs / "job@1" / "output" / "0" / "0.out").read_bytes() == b"second\n"
    for attempt, name in enumerate(("job", "job@1")):
        found = load(runs / name)
        assert found.job is not None and (found.job.job_id, found.job.attempt) == ("job", attempt)
        assert attempts_in(runs / name) == {attempt}
        assert report(found).attempts == 1


@pytest.mark.slow
def test_id_of_the_rendezvous_names_the_run_of_a_single_node_unless_it_is_standalone(
    launch: Launch, tmp_path: Path
) -> None:
    named = ("--rdzv-id", "named")
    for options in (named, named, (*named, "--standalone")):
        assert launch("", *options, RESILIENCE_JOB_ID="").wait() == [0]
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names[1:] == ["named", "named@1"]
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", names[0])


def test_two_launches_at_the_same_time_have_different_attempts(launch: Launch, tmp_path: Path) -> None:
    script = "say('up' + os.environ['RESILIENCE_ATTEMPT'])\nawait_file('go')"
    jobs = [launch(script), launch(script)]
    jobs[0].await_worker("up0.0.0")
    jobs[0].await_worker("up1.0.0")
    (tmp_path / "go").touch()
    assert [job.wait() for job in jobs] == [[0], [0]]
    for attempt, name in enumerate(("job", "job@1")):
        assert attempts_in(tmp_path / "runs" / name) == {attempt}


def test_run_folder_and_attempt_are_allocated_before_the_rendezvous(launch: Launch, tmp_path: Path) -> None:
    """An agent that waits for another node has them already, and the other node takes them."""
    (tmp_path / "runs" / "job").mkdir(parents=True)
    noted = tmp_path / "runs" / "job@1" / "job.json"
    job = launch("", nodes="2", agents=1, nproc=1)
    job.job.await_sign_file(noted)
    before = noted.read_bytes()
    job.job.account = Account(noted.parent)
    assert load(noted.parent).job is not None and job.job.of(events.CycleStarted) == []
    other = job.more()
    assert job.wait() + other.wait() == [0, 0]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"job", "job@1"}
    assert noted.read_bytes() == before
    assert attempts_in(noted.parent) == {1}


def test_all_nodes_and_the_wrappers_inside_take_the_attempt_of_their_launch(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "runs" / "job").mkdir(parents=True)
    script = """
    from resilience.inprocess import Wrapper

    @Wrapper()
    def train():
        pass

    train()
    """
    job = launch(script, nodes="2", agents=2, nproc=1)
    assert job.wait() == [0, 0]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"job", "job@1"}
    job.job.account = Account(tmp_path / "runs" / "job@1")
    for rank in range(2):
        job.job.await_record(events.CallStarted, rank=rank)
    records = load(tmp_path / "runs" / "job@1").records
    assert {record.origin.attempt for record in records} == {1}
    wrapped = [record.origin.node for record in records if isinstance(record.event, events.CallStarted)]
    assert sorted(wrapped) == ["node0", "node1"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_attempt_that_is_asked_for_and_taken_ends_all_nodes_with_what_to_do(
    launch: Launch, tmp_path: Path, nodes: int
) -> None:
    taken = tmp_path / "runs" / "job@4"
    taken.mkdir(parents=True)
    (taken / "job.json").write_text("{}")
    job = launch("", nproc=1, nodes=str(nodes), agents=nodes, RESILIENCE_ATTEMPT="4")
    assert job.wait() == [2] * nodes
    for node in range(nodes):
        said = job.output(node, stream=2)
        assert f"attempt 4 of job job already has a run folder: {taken}" in said
        assert "Unset RESILIENCE_ATTEMPT" in said
    assert content(tmp_path / "runs") == {"job@4/job.json": b"{}"}


def test_signal_while_a_host_waits_for_others_to_read_why_the_job_cannot_start_ends_it(
    launch: Launch, tmp_path: Path
) -> None:
    """No thread is left in a wait on the store that ends: torch prints a stack for it, and may abort the process."""
    taken = tmp_path / "runs" / "job@4"
    taken.mkdir(parents=True)
    (taken / "job.json").write_text("{}")
    job = launch("", nproc=1, nodes="2", agents=1, RESILIENCE_ATTEMPT="4")
    announced = "This node exits when the other nodes have read this, after 300 s at most"
    deadline = time.monotonic() + 120.0
    while not any(announced in path.read_text() for path in tmp_path.glob("*-0.2")):
        assert time.monotonic() < deadline, job.job.output()
        time.sleep(0.01)
    job.job.signal(0, signal.SIGTERM)
    assert job.wait() == [2]
    said = job.output(0, stream=2)
    assert "Exception raised from" not in said and "terminate called" not in said


def test_launch_inside_a_worker_has_a_run_of_its_own(launch: Launch, tmp_path: Path) -> None:
    inner = tmp_path / "inner.py"
    inner.write_text("import os\nprint('inner', os.environ['RESILIENCE_ATTEMPT'])\n")
    command = [sys.executable, "-m", "resilience.launcher", "--cold", str(inner)]
    job = launch(
        f"""
        import subprocess
        print("outer", flush=True)
        sys.exit(subprocess.run({command!r}, timeout=200).returncode)
        """,
        nproc=1,
        SLURM_JOB_ID="77",
    )
    assert job.wait(240.0) == [0]
    runs = tmp_path / "runs"
    (own,) = [path for path in runs.iterdir() if path.name != "job"]
    assert not own.name.startswith(("job", "77"))
    assert (own / "output" / "0" / "0.out").read_text() == "inner 0\n"
    assert (runs / "job" / "output" / "0" / "0.out").read_text() == "outer\ninner 0\n"
    found = load(runs / "job")
    assert found.job is not None and found.job.function.endswith("script.py")
    assert {record.origin.job_id for record in found.records} == {"job"}
    assert {record.origin.job_id for record in load(own).records} == {own.name}


def test_ranks_without_a_launcher_agree_on_an_attempt_of_their_own(start: Start, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    env = {"RESILIENCE_JOB_ID": "job", "SLURM_RESTART_COUNT": "0"}
    for name in ("job", "job@1"):
        job = start(2, WRAPPED, env=env, port=free_port())
        job.account = Account(runs / name)
        assert [rank.code for rank in job.wait()] == [0, 0]
        run = load(runs / name)
        assert run.job is not None and run.job.launch
        started = [record.origin for record in run.records if isinstance(record.event, events.CallStarted)]
        assert sorted(origin.initial_rank or 0 for origin in started) == [0, 1]
    assert attempts_in(runs / "job@1") == {1}


def test_two_starts_without_a_launcher_at_the_same_time_have_different_attempts(start: Start, tmp_path: Path) -> None:
    """The ranks of both are in their function before those of any leave it."""
    env = {"RESILIENCE_JOB_ID": "job"}
    jobs = [start(2, "tests.process.jobs:wait_for_sign", env=env) for _ in range(2)]
    for job, name in zip(jobs, ("job", "job@1"), strict=True):
        job.account = Account(tmp_path / "runs" / name)
    for job in jobs:
        for rank in range(2):
            job.await_record(events.StageStarted, rank=rank, where=lambda event: event.stage == "run")
    (tmp_path / "go").touch()
    assert [rank.value for job in jobs for rank in job.wait()] == [0] * 4
    for attempt, job in enumerate(jobs):
        started = [record.origin for record in job.records() if isinstance(record.event, events.CallStarted)]
        assert sorted((origin.attempt, origin.initial_rank) for origin in started) == [(attempt, 0), (attempt, 1)]


def test_ranks_that_their_launcher_starts_anew_go_on_with_their_attempt(start: Start, tmp_path: Path) -> None:
    endpoints = [str(free_port()), str(free_port())]

    def run(endpoint: str, cycle: int, name: str) -> None:
        env = {"RESILIENCE_JOB_ID": "job", "RESILIENCE_CYCLE": str(cycle), "MASTER_PORT": endpoint}
        job = start(1, WRAPPED, env=env, port=free_port())
        assert [rank.code for rank in job.wait_ranks()] == [0]
        account, deadline = Account(tmp_path / "runs" / name), time.monotonic() + 60.0
        while not any(
            isinstance(record.event, events.MonitorEnded) and record.origin.cycle == cycle
            for record in account.records()
        ):
            assert time.monotonic() < deadline, job.output()
            time.sleep(0.01)

    run(endpoints[0], 0, "job")
    run(endpoints[1], 0, "job@1")  # another launch of the job
    run(endpoints[0], 1, "job")
    first, second = (load(tmp_path / "runs" / name).records for name in ("job", "job@1"))
    assert {record.origin.cycle for record in first} == {0, 1}
    assert {record.origin.cycle for record in second} == {0}
