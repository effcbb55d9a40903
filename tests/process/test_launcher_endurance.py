"""`resilience run` and the fault matrix: what comes again, what is only slow, and what happens to our own processes.

As test_launcher_faults: each test injects its fault, sees the job through and reads the account."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from resilience.facts import events
from resilience.status.state import Watcher
from resilience.system import processes
from resilience.telemetry.metrics import MetricView
from tests.process.launching import Launched, launcher
from tests.process.test_export import receiving
from tests.process.test_launcher import await_end
from tests.process.test_launcher_nodes import IMPATIENT, QUICK, go, whys
from tests.process.told import counted, culprits, only_incident, told
from tests.support.ranks import Job

Launch = Callable[..., Launched]
CGROUPS = Path("/sys/fs/cgroup")
LIMIT = 20.0  # seconds that anything may take
DECOYS = 32


SLOW = pytest.mark.slow  # like one that is always run


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    begin = launcher(start, tmp_path)

    def launch(script: str, *options: str, **more: object) -> Launched:
        return begin(textwrap.dedent(script), *options, **more)

    return launch


# -- memory -------------------------------------------------------------------------------------------


@contextmanager
def little_memory(megabytes: int) -> Iterator[Path]:
    """A control group in which the kernel kills who takes more memory."""
    home = next(
        (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines() if "memory" in line), None
    )
    if home is not None:
        group, limit = CGROUPS / "memory" / home[2].lstrip("/") / f"test{os.getpid()}", "memory.limit_in_bytes"
    else:
        group, limit = CGROUPS / f"test{os.getpid()}", "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group for memory can be made here ({error}); run it as root of a host or container")
    decoys: list[subprocess.Popen[bytes]] = []
    try:
        (group / limit).write_text(str(megabytes << 20))
        for _ in range(DECOYS):
            decoys.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
            Path(f"/proc/{decoys[-1].pid}/oom_score_adj").write_text("1000")
            (group / "cgroup.procs").write_text(str(decoys[-1].pid))
        yield group
    finally:
        for decoy in decoys:
            decoy.kill()
            decoy.wait()
        deadline = time.monotonic() + LIMIT
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)  # who was in it is about to be gone
        group.rmdir()


# The kernel gives the memory of a worker that it has ended back page by page. If another process of the group asks for
# some meanwhile, it ends one more, which would be the agent: so there are decoys, which it ends before. Pages are huge
# where the kernel has some, so that this is soon over. And the worker takes its memory page by page, not in one call of
# mmap, in which the kernel could not end it within a second.
HOARD = """
import mmap, resilience
pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
hoard = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
hoard.madvise(mmap.MADV_HUGEPAGE)
for at in range(0, 320 << 20, 4096): hoard[at] = 1
for step in (1, 2):  # two snapshots lie 2 s apart, and its monitor looks at the process once a second
    resilience.step(step)
    while not any(f'"step":{step},' in path.read_text() for path in pathlib.Path(__file__).parent.rglob("*-0.signs")):
        time.sleep(0.05)
for at in range(320 << 20, 1 << 30, 4096): hoard[at] = 1
"""


def test_out_of_memory_kill_is_recognised_and_the_third_one_ends_the_job(launch: Launch) -> None:  # F12
    with little_memory(512) as group:
        job = launch(HOARD, nproc=1, CGROUP=str(group))
        assert job.wait() == [93]
    incidents = told(job).incidents
    assert [culprits(incident) for incident in incidents] == [[(0, "out_of_memory")]] * 3
    assert {incident.category for incident in incidents} == {"host"}
    assert "SIGKILL, out of memory" in job.output(stream=2)
    process = incidents[0].chief.process if incidents[0].chief is not None else None
    assert process is not None and process.rss_bytes is not None and process.rss_bytes > 300 << 20  # who grew
    assert [record.event.verdict for record in job.of(events.RestartDecided)] == ["restart", "restart", "stop"]


@pytest.mark.slow
def test_memory_error_is_an_exception_of_the_hosts(launch: Launch) -> None:  # F12
    job = launch(
        """
        import resilience, resource
        resilience.step(1)
        if cycle == 0 and rank == 1:
            resource.setrlimit(resource.RLIMIT_AS, (256 << 20,) * 2)
            hoard = bytearray(1 << 30)
        if cycle == 0: await_file("never")
        """,
        SLOW_ANSWERS="yes",
    )
    assert job.wait() == [0]
    incident = only_incident(job)
    assert (incident.kind, incident.category, culprits(incident)) == ("exception", "host", [(1, "exception")])
    assert incident.chief is not None and incident.chief.exception is not None
    assert incident.chief.exception.type == "MemoryError"


# -- slow, and what only looks like a hang ------------------------------------------------------------


@pytest.mark.slow
def test_slow_rank_and_long_phases_within_their_limits_are_no_incident(launch: Launch) -> None:  # F19, F21
    job = launch(
        """
        import resilience
        for step in range(8):
            with resilience.section("step"):
                # The first one compiles, rank 1 is ten times slower than rank 0 all the time.
                time.sleep(6.0 if step == 0 else 0.2 if rank == 1 else 0.02)
            resilience.step(step)
        with resilience.section("checkpoint"):
            time.sleep(6.0)  # longer than a step may take
        """,
        *("--ft-rank-section-timeouts", "step:5,checkpoint:60", "--ft-rank-out-of-section-timeout", "60"),
        *("--ft-warmup-rank-section-timeouts", "step:60", "--ft-num-warmup-iterations", "1"),
    )
    assert job.wait() == [0]
    found = told(job)
    assert (found.incidents, found.completed) == ((), (0, 1))
    assert job.of(events.RankFellSilent) == []


@pytest.mark.slow
def test_stall_that_passes_is_nothing_and_two_that_do_not_are_two_incidents(launch: Launch) -> None:  # F22
    job = launch(
        """
        import resilience
        resilience.step(10 * cycle)
        resilience.heartbeat()
        time.sleep(2.0)  # which passes
        resilience.heartbeat()
        if cycle < 2 and rank == 1:
            time.sleep(600)
        while cycle < 2:
            resilience.heartbeat()
            time.sleep(0.01)
        """,
        *("--ft-rank-heartbeat-timeout", "6"),
    )
    assert job.wait() == [0]
    incidents = told(job).incidents
    assert [(incident.cycle, culprits(incident)) for incident in incidents] == [(0, [(1, "hung")]), (1, [(1, "hung")])]
    assert counted(job) == {"hard_timeout": 2}


# -- our own processes --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=SLOW)])
def test_monitor_that_is_lost_costs_nothing_and_the_gap_is_shown(launch: Launch, number: int) -> None:  # F24, F25
    job = launch(
        """
        import resilience
        step = 0
        while not (here / "go").exists():
            step += 1
            resilience.step(step)
            time.sleep(0.01)
        """,
        *("--ft-step-timeout", "60"),
    )
    pids = [job.worker_pid(rank) for rank in range(2)]
    for rank in range(2):
        job.job.await_record(events.WorkerProgressed, rank=rank)
    lost = next(
        record.origin.pid for record in job.job.of(events.MonitorStarted, rank=1) if record.event.rank_pid == pids[1]
    )
    os.kill(lost, number)
    deadline = time.monotonic() + LIMIT
    while not any(
        record.event.rank_pid == pids[1] and record.origin.pid != lost
        for record in job.job.of(events.MonitorStarted, rank=1)
    ):
        assert time.monotonic() < deadline, "no other monitor has taken over"
        time.sleep(0.01)
    go(job)
    assert job.wait() == [0]
    assert not psutil.pid_exists(lost)
    found = told(job)
    assert found.completed == (0, 1)
    assert [note.ranks for note in found.notes if "lost its monitor" in note.what] == [(1,)]
    # The agent itself ends a monitor that does not answer, maybe only because the host is busy.
    is_killed = number == signal.SIGKILL
    assert [culprits(each) for each in found.incidents] == ([[(1, "monitor_lost")]] if is_killed else [])
    assert counted(job) == ({"monitor_process_exception": 1} if is_killed else {})
    state = Watcher(job.account.folder).look()
    assert state is not None and (state.failure is not None) is is_killed
    assert shown_states(job) == ["active", "unmonitored", "active"]


def shown_states(job: Launched) -> list[str]:
    """What the metrics showed of rank 1, as the records came in, until it ended."""
    view, seen = MetricView(), ["active"]
    for record in job.account.records():
        view.take(record)
        shown = [
            labels[1]
            for (name, labels), on in view.samples().items()
            if name == "resilience_rank_state" and on and labels[0] == "1"
        ]
        seen += [state for state in shown if state != seen[-1]]
    return [state for state in seen if state != "terminated"]


DEAF = """
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
say("up")
time.sleep(600)
"""
LOADING = """
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, index):
        say(f"loads{os.getpid()}")
        time.sleep(0.01)
        return index

for batch in DataLoader(Slow(), num_workers=2, batch_size=2):
    say("up")
"""


@pytest.mark.parametrize("script", [DEAF, LOADING], ids=["deaf", "loading"])
def test_killed_agent_leaves_no_process_of_any_kind(launch: Launch, script: str) -> None:  # F26
    job = launch(script)
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    agent = psutil.Process(job.job.pids[0])
    family = agent.children(recursive=True)
    assert len(family) >= 2 + 2 + 2 + 2  # workers and their children, monitors, zygote and store
    job.job.signal(0, signal.SIGKILL)
    job.wait_agent(0)
    for process in family:
        await_end(process.pid)
    job.job.ran_to_its_end = True
    ends = {record.origin.initial_rank for record in job.job.of(events.RankExited)}
    assert ends == {0, 1}  # the monitors have closed the account
    incident = only_incident(job, killed=job.job.of(events.CycleStarted)[0].origin.node)
    assert (incident.verdict.what, incident.category, culprits(incident)) == ("agent_lost", "host", [(0, "agent_lost")])
    present = Watcher(job.job.run, lambda: time.time() + 10.0).look()
    assert present is not None and (present.phase, present.is_well) == ("lost", False)


@pytest.mark.parametrize("mood", ["stall", *(pytest.param(mood, marks=SLOW) for mood in ("reject", "garbage"))])
def test_back_end_that_is_ill_costs_spans_and_holds_no_restart_up(launch: Launch, mood: str) -> None:  # F33
    with receiving(mood) as receiver:
        job = launch(
            "if cycle == 0: sys.exit(rank)\nif cycle: await_file('go')",
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            OTEL_EXPORTER_OTLP_TIMEOUT="60",
            OTEL_BSP_SCHEDULE_DELAY="20",
            BRIEF="yes",
        )
        assert receiver.has_come.wait(60.0)
        job.await_record(events.CycleStarted, where=lambda event: event.why == "failure")
        go(job)
        assert job.wait() == [0]
        assert not receiver.may_go.is_set()
    incident = only_incident(job)
    assert (culprits(incident), incident.status) == ([(1, "exited")], "restarted")
    lost = [record.event for record in job.of(events.TelemetryDropped)]
    assert sum(event.count for event in lost if event.signal == "span") > 0


@pytest.mark.parametrize("how", ["kill", pytest.param("hang", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader_that_are_lost_or_hang_are_the_input_pipelines_fault(
    launch: Launch, how: str
) -> None:  # F35
    job = launch(
        f"""
        import resilience
        from torch.utils.data import DataLoader, Dataset

        class Data(Dataset):
            def __len__(self): return 64
            def __getitem__(self, index):
                if cycle == 0 and rank == 1 and index == 20:
                    if {how!r} == "kill": os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(600)
                return index

        loaded = iter(DataLoader(Data(), num_workers=1))
        for step in range(64):
            with resilience.section("data"):
                next(loaded)
            resilience.step(step)
        if cycle == 0: await_file("never")
        """,
        *("--ft-rank-section-timeouts", "data:15" if how == "kill" else "data:8"),
        SLOW_ANSWERS="yes",
    )
    assert job.wait() == [0]
    incident = only_incident(job)
    if how == "kill":
        assert (incident.kind, incident.category) == ("exception", "host")
        assert incident.chief is not None and incident.chief.exception is not None
        assert culprits(incident) == [(1, "exception")]
    else:
        assert (incident.category, culprits(incident)) == ("storage", [(1, "input_stall")])


# -- what comes again ---------------------------------------------------------------------------------


def test_same_failure_again_and_again_is_three_incidents_that_know_of_each_other(launch: Launch) -> None:  # F39
    script = "import resilience; resilience.step(5)\nif rank: raise ValueError('bad batch')\nawait_file('never')"
    job = launch(script, SLOW_ANSWERS="yes")
    assert job.wait() == [93]
    incidents = told(job).incidents
    assert [incident.same_as for incident in incidents] == [(), (1,), (1, 2)]
    assert [incident.status for incident in incidents] == ["restarted", "restarted", "ended"]
    assert "another restart will not help" in " ".join(incidents[-1].advice)
    rows = [line for line in job.output(stream=2).splitlines() if line.endswith("ValueError: bad batch")]
    assert len(rows) >= 3  # the table


@SLOW
def test_other_failures_one_after_the_other_are_no_repetition(launch: Launch) -> None:  # F39
    job = launch("import resilience; resilience.step(cycle)\nif cycle < 4 and rank: sys.exit(10 + cycle)")
    assert job.wait() == [0]
    assert [(incident.cycle, incident.same_as) for incident in told(job).incidents] == [(c, ()) for c in range(4)]


def test_job_that_restarts_and_never_gets_further_is_ended(launch: Launch) -> None:  # F40
    job = launch(
        """
        import resilience
        for step in range(3 - cycle % 2): resilience.step(step)
        sys.exit(10 + cycle if rank else 0)
        """,
        *("--stalled-restarts", "3"),
    )
    assert job.wait() == [93]
    assert len(job.of(events.CycleStarted)) == 4
    assert "no worker has come beyond step 2 in 4 starts" in job.output(stream=2)
    assert [record.event.step for record in job.of(events.CycleEnded)] == [2, 1, 2, 1]  # each cycle's own
    assert len(told(job).incidents) == 4


def test_script_without_steps_gets_all_restarts_and_advice_to_report_steps(launch: Launch) -> None:  # F48
    job = launch("sys.exit(10 if rank else 0)", "--max-restarts", "4")
    assert job.wait() == [1]
    found = told(job)
    assert found.launched is not None
    assert "this script reports no step, so progress is unknown; call resilience.step(n)" in found.launched.detail
    assert [culprits(incident) for incident in found.incidents] == [[(1, "exited")]] * 5
    assert {incident.cost.lost_steps for incident in found.incidents} == {None}
    assert found.times.productive_s < found.times.total_s


@pytest.mark.slow
def test_late_and_surplus_nodes_disturb_no_healthy_cycle(launch: Launch) -> None:  # F43
    job = launch("say('up'); await_file('go')", nodes="1:2", agents=1, nproc=1, conf=IMPATIENT)
    job.await_worker("up.0.0")
    late = job.more()  # there is room: the one reason for a new cycle
    job.await_worker("up.1.0")
    surplus = late.more()
    job.await_arrival("node2")
    pids = [job.worker_pid(rank, cycle=1) for rank in range(2)]
    assert all(processes.state(pid) is not None for pid in pids)
    go(job)
    assert (job.wait(), late.wait(), surplus.wait()) == ([0], [0], [0])
    found = told(job)
    assert found.incidents == () and found.launched is not None and found.launched.restarts_used == 0
    assert whys(job, 0, 1, 2) == [["first", "membership"], ["first"], []]


@pytest.mark.slow
def test_node_that_leaves_and_comes_back_again_and_again_gets_no_new_budget(launch: Launch) -> None:  # F44
    job = launch("say('up')\nawait_file('never')", "--max-restarts", "1", nodes="1:2", agents=2, nproc=1, conf=QUICK)
    job.await_worker("up.0.1")
    job.job.signal(1, signal.SIGKILL)
    job.await_worker("up.1.0")  # else the node that comes back may have a place in that cycle
    back = job.again(1)
    job.await_worker("up.2.1")
    back.job.signal(0, signal.SIGKILL)
    assert job.wait_agent(0).code == 1
    job.wait()
    back.wait()
    assert "node node1 is lost; the only restart is used" in job.output(0, 2)
    assert whys(job, 0) == [["first", "failure", "membership"]]
    incidents = told(job, killed="node1").incidents
    assert [incident.verdict.what for incident in incidents] == ["node_lost", "node_lost"]
    assert [culprits(incident) for incident in incidents] == [[(1, "node_lost")]] * 2
    assert counted(job) == {"unresponsive": 2}
