"""Several agents of one job: the clauses of torchelastic's contract, and where ours goes beyond them.

The letters are those of the contract in docs/launcher.md."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.core.cycle_nodes import WELL
from resilience.facts import events
from tests.process.launching import NO_NODE_IS_LOST, Launched, launcher
from tests.process.test_launcher import await_end
from tests.process.told import told
from tests.support.ranks import Job

Launch = Callable[..., Launched]
QUICK = NO_NODE_IS_LOST.replace("3000", "60")  # lost after twelve seconds of silence
IMPATIENT = NO_NODE_IS_LOST.replace("=60", "=0.3")  # a cycle begins although a node may come later
RUN_ON = "say(os.environ['RESILIENCE_NODE'])\nif cycle == 0: await_file('never')\nsay('again')"
WAIT = "say(os.environ['RESILIENCE_NODE'])\nawait_file('go')"


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    begin = launcher(start, tmp_path)

    def nodes(
        script: str, *options: str, nodes: str = "2", agents: int = 2, conf: str = NO_NODE_IS_LOST, **more: object
    ) -> Launched:
        return begin(script, *options, nodes=nodes, agents=agents, nproc=1, conf=conf, **more)

    return nodes


def whys(job: Launched, *nodes: int) -> list[list[str]]:
    """Why each cycle of these nodes began."""
    return [[record.event.why for record in job.of(events.CycleStarted, f"node{number}")] for number in nodes]


def outcomes(job: Launched) -> dict[str | None, tuple[str, int]]:
    """How the job ended on each node."""
    return {record.origin.node: (record.event.outcome, record.event.exit_code) for record in job.of(events.JobEnded)}


def has_ended(job: Launched, number: int) -> bool:
    return job.job.server.wait(job.job.pids[number], 0.0) is not None


def go(job: Launched, name: str = "go") -> None:
    (job.folder / name).touch()


def await_restart_line(job: Launched, text: str) -> None:
    """Wait until a node prints this about a restart."""
    until = time.monotonic() + 150
    while text not in job.job.written():
        assert time.monotonic() < until, job.job.output()
        time.sleep(0.05)


# -- (a) nodes finish apart ---------------------------------------------------------------------------


def test_a_nodes_may_finish_apart(launch: Launch) -> None:
    job = launch("if rank == 0: await_file('go')")
    job.await_record(events.WorkerExited)  # that of rank 1
    assert not has_ended(job, 0) and not has_ended(job, 1)
    go(job)
    assert job.wait() == [0, 0]
    assert set(outcomes(job).values()) == {("completed", 0)}


# -- (b) (c) failures ---------------------------------------------------------------------------------


def test_b_one_nodes_failure_stops_the_workers_of_all_for_a_new_cycle(launch: Launch) -> None:
    job = launch("await_all()\nif cycle == 0:\n    if rank == 1: sys.exit(3)\n    await_file('never')")
    assert job.wait() == [0, 0]
    assert whys(job, 0, 1) == [["first", "failure"], ["first", "failure"]]
    exits = {(r.origin.cycle, r.event.worker_rank): r.event for r in job.of(events.WorkerExited)}
    assert (exits[0, 1].code, exits[0, 1].expected) == (3, False)
    assert (exits[0, 0].signal, exits[0, 0].expected) == ("SIGTERM", True)


def test_c_restarts_are_counted_for_the_job_and_not_for_each_agent(launch: Launch) -> None:
    script = """
    print(cycle, os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)
    say('printed')
    if rank == cycle % 2:
        await_file(f'printed.{cycle}.{1 - rank}')
        sys.exit(10 + cycle)
    await_file('never')
    """
    job = launch(script, "--max-restarts", "3")
    assert job.wait() == [1, 1]
    assert whys(job, 0, 1) == [["first", *["failure"] * 3]] * 2
    assert sorted(record.event.restarts_used for record in job.of(events.CycleStarted)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert job.output(0).splitlines() == job.output(1).splitlines() == ["0 0", "1 1", "2 2", "3 3"]
    decided = [record.event for record in job.of(events.RestartDecided)]
    assert [event.verdict for event in decided] == ["restart", "restart", "restart", "stop"]


# -- (d) membership -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_c_restart_is_counted_if_the_agent_that_decides_is_killed_on_the_way(launch: Launch) -> None:
    job = launch(
        "say('ran')\nif cycle == 0 and rank == 1: sys.exit(3)\nif cycle == 0: await_file('never')",
        nodes="1:2",
        per_agent=({}, {"DIES": "spending"}),
        conf="last_call_timeout=100",  # the first cycle has both
    )
    assert job.wait() == [0, -signal.SIGKILL]
    (began,) = [record for record in job.of(events.CycleStarted) if record.origin.cycle == 1]
    assert (began.event.why, began.event.restarts_used) == ("failure", 1)
    assert job.of(events.RestartDecided) == []  # it was killed before it could tell


def test_d_node_that_joins_costs_no_restart(launch: Launch) -> None:
    script = "say(f'size{size}')\nif size == 1: await_file('never')"
    job = launch(script, "--max-restarts", "0", nodes="1:2", agents=1, conf=IMPATIENT)
    job.await_worker("size1.0.0")
    late = job.more()
    assert late.wait() == [0]
    assert job.wait() == [0]
    assert whys(job, 0, 1) == [["first", "membership"], ["first"]]
    assert {path.name for path in job.folder.glob("size2.*")} == {"size2.1.0", "size2.1.1"}
    assert [record.event.restarts_used for record in job.of(events.CycleStarted)] == [0, 0, 0]
    assert job.of(events.RestartDecided) == []


# -- (e) ends -----------------------------------------------------------------------------------------


def test_d_node_with_another_limit_of_silence_ends_with_an_error_and_the_job_continues(launch: Launch) -> None:
    other = NO_NODE_IS_LOST.replace("3000", "4000")
    per_agent = ({}, {"PET_RDZV_CONF": f"is_host=0,{other}"})
    job = launch(WAIT, nodes="1:2", agents=1, conf=IMPATIENT, per_agent=per_agent)
    job.await_worker("node0.0.0")
    newcomer = job.more()
    assert newcomer.wait() == [2]
    limit = "--rdzv-conf keep_alive_interval × keep_alive_max_attempt"
    assert f"{limit} is 800 s on node node1, but 600 s on node node0" in newcomer.output(0, 2)
    (job.folder / "go").touch()
    assert job.wait() == [0]
    assert [each.origin.cycle for each in job.of(events.CycleStarted)] == [0]


def test_e_exit_with_0_is_premature_if_others_do_not_follow(launch: Launch) -> None:
    job = launch("await_all()\nif rank == 0: await_file('never')", "--exit-barrier-timeout", "0.5")
    assert job.wait() == [1, 1]
    assert set(outcomes(job).values()) == {("failed", 1)}
    assert "premature completion: the workers of node1 ended well" in job.output(0, 2) + job.output(1, 2)
    exits = {r.event.worker_rank: r.event for r in job.of(events.WorkerExited)}
    assert (exits[0].signal, exits[0].expected) == ("SIGTERM", True)


def test_e_exit_with_0_is_no_success_if_others_fail_waiting_for_it(launch: Launch) -> None:
    job = launch("if cycle == 0 and rank == 0:\n    await_file('go')\n    sys.exit(3)\nsay('end')")
    job.await_worker("end.0.1")
    go(job)
    assert job.wait() == [0, 0]
    assert {path.name for path in job.folder.glob("end.*")} == {"end.0.1", "end.1.0", "end.1.1"}


@pytest.mark.slow
def test_e_no_cycle_begins_for_a_newcomer_once_a_node_has_finished(launch: Launch) -> None:
    job = launch("if rank == 0: await_file('go')", nodes="2:3", conf=IMPATIENT)
    job.await_record(events.WorkerExited)
    store, until = job.rendezvous(), time.monotonic() + 60.0
    while store.add("job/nodes/0", 0) < WELL:  # until then the other node does not know it, and takes a newcomer
        assert time.monotonic() < until
        time.sleep(0.05)
    late = job.more()
    job.await_arrival("node2")
    go(job)
    assert job.wait() == [0, 0]
    assert late.wait() == [0]  # the job it waited for has completed
    assert whys(job, 0, 1, 2) == [["first"], ["first"], []]
    assert outcomes(job)["node2"] == ("completed", 0)


# -- (f) spares ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_f_newcomer_waits_and_joins_when_a_place_becomes_free(launch: Launch) -> None:
    job = launch(RUN_ON, conf=QUICK)
    for number in range(2):
        job.worker_pid(number)
    spare = job.more()
    job.await_arrival("node2")
    assert whys(job, 2) == [[]]
    job.job.signal(1, signal.SIGKILL)
    assert spare.wait() == [0]
    assert job.wait_agent(0).code == 0
    job.wait()
    assert whys(job, 0, 2) == [["first", "failure"], ["first"]]


def test_f_spare_that_takes_the_first_place_prints_the_restart(launch: Launch) -> None:
    """node0 hosts the job's store; node1 has the first place, so it prints what all nodes know."""
    job = launch(RUN_ON, conf=QUICK, per_agent=tuple({"GROUP_RANK": rank} for rank in "100"))
    for number in range(2):
        job.worker_pid(number)
    spare = job.more()
    job.await_arrival("node2")
    job.job.signal(1, signal.SIGKILL)
    assert spare.wait() == [0]
    assert job.wait_agent(0).code == 0
    job.wait()
    assert [record.event.group_rank for record in job.of(events.RendezvousCompleted, "node2")] == [0]
    (line,) = [line for line in spare.output(0, 2).splitlines() if "restart 1 of 10" in line]
    assert "node1" in line
    assert "records in" in spare.output(0, 2)


def test_f_spare_ends_as_the_job_does(launch: Launch) -> None:
    job = launch("await_file('go')\nsys.exit(7)", "--max-restarts", "0")
    for number in range(2):
        job.worker_pid(number)
    spare = job.more()
    job.await_arrival("node2")
    go(job)
    assert job.wait() == [1, 1]
    assert spare.wait() == [1]
    assert outcomes(job)["node2"] == ("exhausted", 1)


@pytest.mark.slow
def test_f_spare_goes_on_when_all_nodes_of_the_cycle_are_lost(launch: Launch, tmp_path: Path) -> None:
    """node0 hosts the job's store and comes late: its health check ends once node1 has run a second cycle."""
    check = f'[ "$RESILIENCE_NODE" = node1 ] || until [ -e {tmp_path}/ran.1.0 ]; do sleep 0.05; done'
    script = "say('ran')\nif cycle == 0: sys.exit(3)\nif cycle == 1: await_file('never')"
    job = launch(script, "--health-check", check, nodes="1", conf=QUICK)
    job.await_worker("ran.1.0")
    job.await_arrival("node0")
    job.job.signal(1, signal.SIGKILL)
    assert job.wait_agent(0).code == 0
    job.wait()
    assert (tmp_path / "ran.2.0").exists()
    decided = [(record.origin.node, record.origin.cycle, record.event) for record in job.of(events.RestartDecided)]
    assert [each[:2] for each in decided] == [("node1", 0), ("node0", 1)]
    assert (decided[1][2].verdict, decided[1][2].why) == ("restart", "node node1 is lost")
    assert [each[2].restarts_used for each in decided] == [1, 2]
    (began,) = job.of(events.CycleStarted, "node0")
    assert (began.origin.cycle, began.event.restarts_used) == (2, 2)
    incidents = told(job, killed="node1").incidents
    assert [(each.cycle, each.verdict.what) for each in incidents] == [(0, "exited"), (1, "node_lost")]


# -- (g) lost nodes -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_g_node_that_is_lost_as_soon_as_it_has_its_place_is_missed(launch: Launch) -> None:
    job = launch(RUN_ON, nodes="1:2", per_agent=({}, {"DIES": "seated"}), conf=QUICK)
    assert job.wait() == [0, -signal.SIGKILL]
    (last,) = [each.event for each in job.of(events.RendezvousCompleted) if each.origin.cycle == 1]
    assert (last.nodes, last.world_size) == (1, 1)
    assert whys(job, 0) == [["first", "failure"]]


def test_g_lost_node_is_noticed_and_the_others_go_on_without_it(launch: Launch) -> None:
    job = launch(RUN_ON, nodes="1:2", conf=QUICK)
    pids = [job.worker_pid(rank) for rank in range(2)]
    job.job.signal(1, signal.SIGKILL)
    for pid in pids:
        await_end(pid)  # one was stopped, the other does not outlive its agent
    assert job.wait_agent(0).code == 0
    job.wait()
    assert whys(job, 0) == [["first", "failure"]]
    assert [path.name for path in job.folder.glob("again.*")] == ["again.1.0"]
    (decided,) = job.of(events.RestartDecided)
    assert (decided.event.why, decided.event.restarts_used) == ("node node1 is lost", 1)


@pytest.mark.slow
def test_g_lost_node_ends_a_job_that_has_no_restart_left(launch: Launch) -> None:
    job = launch(RUN_ON, "--max-restarts", "0", conf=QUICK)
    for number in range(2):
        job.worker_pid(number)
    job.job.signal(1, signal.SIGKILL)
    assert job.wait_agent(0).code == 1
    job.wait()
    assert "node node1 is lost; no restart is allowed" in job.output(0, 2)


def test_g_loss_of_the_node_that_hosts_the_store_ends_the_job_and_is_reported(launch: Launch) -> None:
    job = launch(RUN_ON, conf=QUICK)
    pids = [job.worker_pid(rank) for rank in range(2)]
    job.job.signal(0, signal.SIGKILL)
    assert job.wait_agent(1).code == 1
    job.wait()
    for pid in pids:
        await_end(pid)
    assert "this node leaves the job: node node1 could not reach the job's store at 127.0.0.1:" in job.output(1, 2)
    assert outcomes(job) == {"node1": ("failed", 1)}


# -- (h) permanent failures ---------------------------------------------------------------------------


def test_h_permanent_failure_ends_the_job_on_all_nodes(launch: Launch) -> None:
    script = """
    await_all()
    if rank and cycle == 2: await_file('go')
    if rank: raise ValueError('bad batch')
    await_file('never')
    """
    job = launch(script, SLOW_ANSWERS="yes")
    await_restart_line(job, "the same failure 2 times in a row")  # not printed by the node that failed and decided
    go(job)
    assert job.wait() == [93, 93]
    assert whys(job, 0, 1) == [["first", "failure", "failure"]] * 2
    for number in range(2):
        assert "3 times in a row" in job.output(number, 2)
        assert "ValueError: bad batch" in job.output(number, 2)


# -- who is asked to stop -----------------------------------------------------------------------------

CHECKPOINT = """
import resilience
resilience.stop_requested()  # from now on it is known to look
say("up")
while not resilience.stop_requested():
    time.sleep(0.005)
say("saved")
"""


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_sigterm_to_one_agent_gives_all_workers_time_for_a_checkpoint(launch: Launch, number: int) -> None:
    job = launch(CHECKPOINT)
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    job.job.signal(number, signal.SIGTERM)
    assert job.wait() == [128 + signal.SIGTERM] * 2
    assert {path.name for path in job.folder.glob("saved.*")} == {"saved.0.0", "saved.0.1"}
    assert set(outcomes(job).values()) == {("preempted", 143)}
    assert [record.event.code for record in job.of(events.WorkerExited)] == [0, 0]
    assert job.of(events.RestartDecided) == job.of(events.RankInterrupted) == []


def test_sigterm_to_one_rank_is_a_failure_of_that_rank_on_all_nodes(launch: Launch) -> None:
    job = launch("if cycle == 0:\n    say('up'); await_file('never')")
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    os.kill(job.worker_pid(1), signal.SIGTERM)
    assert job.wait() == [0, 0]
    assert whys(job, 0, 1) == [["first", "failure"]] * 2
    assert [record.event.fingerprint for record in job.of(events.RestartDecided)] == ["signal:SIGTERM"]


def test_sigterm_to_a_spare_is_for_the_spare(launch: Launch) -> None:
    job = launch(WAIT)
    for number in range(2):
        job.worker_pid(number)
    spare = job.more()
    job.await_arrival("node2")
    spare.job.signal(0, signal.SIGTERM)
    assert spare.wait() == [128 + signal.SIGTERM]
    go(job)
    assert job.wait() == [0, 0]


def test_sigterm_before_the_first_cycle_to_the_node_that_hosts_the_store_stops_the_job(launch: Launch) -> None:
    job = launch("say('ran')", nodes="3", agents=2)
    for node in ("node0", "node1"):
        job.await_arrival(node)
    job.job.signal(0, signal.SIGTERM)
    assert job.wait() == [128 + signal.SIGTERM] * 2
    assert set(outcomes(job).values()) == {("preempted", 143)}
    assert not job.of(events.WorkerStarted)


def test_node_that_finds_no_others_says_so(launch: Launch) -> None:
    job = launch("say('ran')", nodes="2", agents=1, conf="join_timeout=0.5")
    assert job.wait() == [1]
    assert "0 nodes took part in the last one; waiting 1," in job.output(stream=2)
    assert outcomes(job) == {"node0": ("failed", 1)}


@pytest.mark.slow
def test_node_that_lacks_memory_to_start_its_workers_leaves_if_the_others_are_enough(launch: Launch) -> None:
    job = launch("await_file('go')", nodes="1:2", agents=2, per_agent=({}, {"LACKS": "memory"}))
    job.await_record(events.CycleStarted, "node0", lambda event: event.why != "first")
    assert job.wait_agent(1).code == 95
    go(job)
    assert job.wait()[0] == 0
    assert "the workers cannot be started: [Errno 12] Cannot allocate memory" in job.output(1, stream=2)


@pytest.mark.slow
def test_node_whose_log_folder_is_full_leaves_if_the_others_are_enough(launch: Launch, tmp_path: Path) -> None:
    options = ("--log-dir", str(tmp_path / "logs"), "--redirects", "3")
    job = launch("await_file('go')", *options, nodes="1:2", agents=2, per_agent=({}, {"LACKS": "space"}))
    job.await_record(events.CycleStarted, "node0", lambda event: event.why != "first")
    assert job.wait_agent(1).code == 95
    go(job)
    assert job.wait()[0] == 0
    assert "the workers cannot be started: [Errno 28] No space left on device" in job.output(1, stream=2)


def starts_with_one_that_fails(launch: Launch, number: int, fails: Path, *options: str) -> Launched:
    """Start two nodes that a job needs; the start of one of them waits until it is to fail."""
    per_agent = tuple({"START_FAILS": str(fails)} if node == number else {} for node in range(3))
    job = launch("", *options, nodes="2", per_agent=per_agent)
    job.await_arrival(f"node{1 - number}")
    job.job.await_sign_file(Path(f"{fails}.waits"))
    return job


def test_node_whose_start_fails_leaves_and_another_one_takes_its_place(launch: Launch, tmp_path: Path) -> None:
    job = starts_with_one_that_fails(launch, 1, tmp_path / "fails")
    go(job, "fails")
    assert job.wait_agent(1).code == 1
    assert "the rank monitors of node1 cannot be started: [Errno 11]" in job.output(1, stream=2)
    assert job.more().wait() == [0]
    assert job.wait() == [0, 1]
    assert outcomes(job) == {"node0": ("completed", 0), "node1": ("excluded", 1), "node2": ("completed", 0)}


def test_host_of_the_store_whose_start_fails_tells_the_others_why(launch: Launch, tmp_path: Path) -> None:
    job = starts_with_one_that_fails(launch, 0, tmp_path / "fails")
    go(job, "fails")
    assert job.wait() == [1, 1]
    why = "node node0: MonitorError: the rank monitors of node0 cannot be started: [Errno 11]"
    assert f"the job failed: {why}" in job.output(1, stream=2)


def test_ctrl_c_that_only_one_starting_node_gets_ends_that_node_only(launch: Launch, tmp_path: Path) -> None:
    job = starts_with_one_that_fails(launch, 1, tmp_path / "fails", "--signals-to-handle", "SIGTERM")
    job.job.signal(1, signal.SIGINT)
    job.wait_agent(1)
    assert job.more().wait() == [0]
    assert job.wait()[0] == 0


def test_ctrl_c_that_no_agent_handles_ends_a_running_job_with_the_name_of_its_node(launch: Launch) -> None:
    job = launch("say('up')\nawait_file('never')", "--signals-to-handle", "SIGTERM")
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    job.job.signal(1, signal.SIGINT)
    assert job.wait_agent(0).code == 1
    assert "the job failed: node node1: Ctrl-C" in job.output(0, stream=2)


def test_node_that_leaves_and_cannot_tell_how_the_job_ended_ends_it_for_no_other(launch: Launch) -> None:
    job = launch("await_file('go')", nodes="1:2", per_agent=({}, {"LACKS": "memory", "FAILS": "report"}))
    job.await_record(events.CycleStarted, "node0", lambda event: event.why != "first")
    assert job.wait_agent(1).code == 1  # an error of the launcher, not 95
    go(job)
    assert job.wait()[0] == 0


def test_program_that_is_on_no_node_fails_the_job_on_all(launch: Launch) -> None:
    job = launch("", "--no-python", "no_such_program", nodes="1:2", agents=2)
    assert job.wait() == [1, 1]
    assert set(outcomes(job).values()) == {("failed", 1)}


# -- requests -----------------------------------------------------------------------------------------

ASK = """
from resilience.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest
await_all()
if cycle == 0 and os.environ["RESILIENCE_NODE"] == "node0":
    client = RankMonitorClient()
    client.init_workload_monitoring()
    client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "bad memory"))
if cycle == 0:
    await_file("never")
say("again")
await_file("go")
"""


@pytest.mark.slow
def test_excluded_node_that_hosts_the_store_stays_until_the_others_are_through(launch: Launch) -> None:
    job = launch(ASK, nodes="1:2")
    job.await_worker("again.1.0")
    assert not has_ended(job, 0)
    go(job)
    assert job.wait() == [95, 0]
    assert outcomes(job) == {"node0": ("excluded", 95), "node1": ("completed", 0)}
    assert whys(job, 0, 1) == [["first"], ["first", "request"]]
    assert job.of(events.RestartDecided) == []
    assert [record.event.why for record in job.of(events.NodeExcluded)] == [
        "this node's exclusion was asked for: node node0 leaves: bad memory"
    ]


@pytest.mark.slow
def test_sigterm_to_an_excluded_node_that_hosts_the_store_stops_the_job(launch: Launch) -> None:
    job = launch(ASK, nodes="1:2")
    job.await_worker("again.1.0")
    job.job.signal(0, signal.SIGTERM)
    assert job.wait() == [95, 143]
    assert outcomes(job) == {"node0": ("excluded", 95), "node1": ("preempted", 143)}
    (ended,) = job.of(events.JobEnded, "node1")
    assert ended.event.detail == "SIGTERM to the agent of node0, which hosts the job's store"


def two_jobs(launch: Launch) -> tuple[Launched, Launched]:
    """Return two jobs at work that share an endpoint. The first one's node hosts the store."""
    script = "say(os.environ['RESILIENCE_NODE'])\nawait_file('go.' + os.environ['RESILIENCE_NODE'])"
    first = launch(script, nodes="1:2", agents=1, conf=IMPATIENT)
    first.await_worker("node0.0.0")
    other = {"RESILIENCE_NODE": "other", "PET_RDZV_CONF": f"is_host=0,{IMPATIENT}", "PET_RDZV_ENDPOINT": first.endpoint}
    options = ("--rdzv-id", "other")
    second = launch(script, *options, nodes="1:2", agents=1, per_agent=(other,), RESILIENCE_JOB_ID="other")
    second.await_worker("other.0.0")
    return first, second


def test_job_ends_with_the_job_that_hosts_the_store_of_its_endpoint(launch: Launch) -> None:
    first, second = two_jobs(launch)
    (first.folder / "go.node0").touch()
    assert (first.wait(), second.wait()) == ([0], [1])
    assert "the job's store" in second.output(0, 2)
