"""SIGTERM to agents of a job on several nodes: a node leaves and the others go on, or the whole job stops."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resilience.core import agent_liveness, membership
from resilience.core.membership import Arrived
from resilience.facts import events
from tests.process.launching import NO_NODE_IS_LOST, Launched, launcher
from tests.process.test_launcher_nodes import go, outcomes, whys
from tests.process.told import told
from tests.support.ranks import Job
from tests.support.stops import stop

Launch = Callable[..., Launched]
PREEMPTED = ("preempted", 143)
UNTIL_GO = "say('up')\nif cycle == 0: await_file('never', 600)\nawait_file('go')"
LOOKS = """
import resilience
resilience.stop_requested()
say("up")
while cycle == 0:
    if resilience.stop_requested():
        say("saved")
        sys.exit()
    time.sleep(0.005)
await_file("go")
"""
SLOW_TO_END_ON_NODE2 = """
def end(*_):
    await_file("end")
    sys.exit()
if os.environ["RESILIENCE_NODE"] == "node2":
    signal.signal(signal.SIGTERM, end)
say("up")
await_file("never", 600)
"""


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    begin = launcher(start, tmp_path)

    def nodes(script: str, *options: str, nodes: str = "2:3", agents: int = 3, **more: Any) -> Launched:
        job = begin(script, *options, nodes=nodes, agents=agents, nproc=1, conf=NO_NODE_IS_LOST, **more)
        for rank in range(int(nodes.rpartition(":")[2])):
            job.await_worker(f"up.0.{rank}")
        return job

    return nodes


@pytest.mark.parametrize(
    "script", [pytest.param(UNTIL_GO, marks=pytest.mark.slow), LOOKS], ids=["ends", "looks for a stop"]
)
def test_evicted_node_leaves_and_the_others_form_the_next_cycle_at_once(launch: Launch, script: str) -> None:
    job = launch(script)
    job.job.signal(2, signal.SIGTERM)
    assert job.wait_agent(2).code == 143
    for rank in range(2):
        job.await_worker(f"up.1.{rank}")
    go(job)
    assert job.wait() == [0, 0, 143]
    assert whys(job, 0, 1, 2) == [["first", "membership"], ["first", "membership"], ["first"]]
    assert outcomes(job) == {"node0": ("completed", 0), "node1": ("completed", 0), "node2": PREEMPTED}
    assert (job.of(events.RestartDecided), job.of(events.RankInterrupted)) == ([], [])
    if script == LOOKS:
        assert {path.name for path in job.folder.glob("saved.*")} == {f"saved.0.{rank}" for rank in range(3)}
    found = told(job)
    assert found.launched is not None and found.incidents == ()
    assert (found.launched.outcome, found.launched.restarts_used) == ("completed", 0)


def test_spare_takes_the_place_of_an_evicted_node(launch: Launch) -> None:
    job = launch(UNTIL_GO, nodes="2", agents=2)
    spare = job.more()
    job.await_arrival("node2")
    job.job.signal(1, signal.SIGTERM)
    for rank in range(2):
        job.await_worker(f"up.1.{rank}")
    go(job)
    assert (job.wait(), spare.wait()) == ([0, 143], [0])
    assert whys(job, 0, 1, 2) == [["first", "membership"], ["first"], ["first"]]


def test_evicted_node_that_hosts_the_store_stops_the_job_and_says_so_at_the_start(launch: Launch) -> None:
    job = launch(UNTIL_GO)
    assert "this node hosts the job's store: SIGTERM to it stops the whole job" in job.output(0, 2)
    assert "hosts the job's store" not in job.output(1, 2)
    job.job.signal(0, signal.SIGTERM)
    assert job.wait() == [143] * 3
    assert set(outcomes(job).values()) == {PREEMPTED}
    assert [len(each) for each in whys(job, 0, 1, 2)] == [1, 1, 1]


def await_counts(store: Any, count: int) -> None:
    """Wait until the agent that arrived first has counted so many times more: it is there, and so is the store."""
    first = membership.decode_entry(store.get("log/0").decode())
    assert isinstance(first, Arrived)
    counts = agent_liveness.key(first.seat.id)
    enough, deadline = store.add(counts, 0) + count, time.monotonic() + 60.0
    while store.add(counts, 0) < enough:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_second_sigterm_to_the_host_of_the_store_takes_no_time_from_workers_of_other_nodes(launch: Launch) -> None:
    script = SLOW_TO_END_ON_NODE2.replace("node2", "node1")
    job = launch(script, nodes="2", agents=2)
    job.job.signal(0, signal.SIGTERM)
    job.await_record(events.JobEnded, "node0")
    job.job.signal(0, signal.SIGTERM)
    await_counts(job.rendezvous(), 20)
    go(job, "end")
    assert job.wait() == [143] * 2
    assert [record.event.code for record in job.of(events.WorkerExited, "node1")] == [0]


@pytest.mark.parametrize(
    ("options", "nodes", "number"),
    [
        (("--on-sigterm", "stop"), "2:3", signal.SIGTERM),
        pytest.param((), "3", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param((), "2:3", signal.SIGINT, marks=pytest.mark.slow),
    ],
    ids=["stop", "too few left", "Ctrl-C"],
)
def test_signal_to_one_agent_stops_the_whole_job(
    launch: Launch, options: tuple[str, ...], nodes: str, number: signal.Signals
) -> None:
    job = launch(UNTIL_GO, *options, nodes=nodes)
    job.job.signal(2, number)
    assert job.wait() == [128 + number] * 3
    assert set(outcomes(job).values()) == {("preempted", 128 + number)}
    assert {record.event.signal for record in job.of(events.WorkerExited)} == {number.name}  # on all nodes
    assert [len(each) for each in whys(job, 0, 1, 2)] == [1, 1, 1]


def test_node_that_ignores_the_signal_ends_its_workers_by_sigterm(launch: Launch) -> None:
    job = launch(UNTIL_GO, nodes="2:3", per_agent=({}, {"NOHUP": "yes"}, {}))
    job.job.signal(0, signal.SIGHUP)
    assert job.wait() == [128 + signal.SIGHUP] * 3
    ends = {record.origin.node: record.event.signal for record in job.of(events.WorkerExited)}
    assert ends == {"node0": "SIGHUP", "node1": "SIGTERM", "node2": "SIGHUP"}


@pytest.mark.parametrize(
    "script", [UNTIL_GO, pytest.param(LOOKS, marks=pytest.mark.slow)], ids=["ends", "looks for a stop"]
)
def test_agents_that_are_all_signalled_are_one_preemption(launch: Launch, script: str) -> None:
    job = launch(script, nodes="1:3")
    stop(*job.job.pids)  # so that none of them leaves alone before the last signal
    for number in (2, 1, 0):
        job.job.signal(number, signal.SIGTERM)
    for number in (2, 1, 0):
        job.job.signal(number, signal.SIGCONT)
    assert job.wait() == [143] * 3
    assert set(outcomes(job).values()) == {PREEMPTED}
    assert (job.of(events.RestartDecided), job.of(events.RankInterrupted)) == ([], [])
    found = told(job)
    assert found.launched is not None and found.incidents == ()
    assert (found.launched.outcome, found.launched.exit_code) == PREEMPTED
    if script == LOOKS:
        assert {path.name for path in job.folder.glob("saved.0.*")} == {f"saved.0.{rank}" for rank in range(3)}


def test_agents_that_are_signalled_while_the_others_form_a_cycle_are_one_preemption(launch: Launch) -> None:
    job = launch(SLOW_TO_END_ON_NODE2, nodes="1:3")
    job.job.signal(2, signal.SIGTERM)
    for node in ("node0", "node1"):
        job.await_record(events.CycleEnded, node)
    for number in (1, 0):
        job.job.signal(number, signal.SIGTERM)
    assert job.wait_agent(1).code == 143  # it waits for nobody, and node0, which hosts the store, for node2
    go(job, "end")
    assert job.wait() == [143] * 3
    assert set(outcomes(job).values()) == {PREEMPTED}
    assert [len(each) for each in whys(job, 0, 1, 2)] == [1, 1, 1]
