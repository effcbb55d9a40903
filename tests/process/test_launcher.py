"""`resilience run` on one node: what it does with workers that fail, finish, or are asked to stop."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from resilience.facts import events
from resilience.facts.interruptions import Interruption
from tests.process.launching import Launched, launcher
from tests.support.pids import child_named
from tests.support.ranks import Job

Launch = Callable[..., Launched]


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    return launcher(start, tmp_path)


def test_job_that_completes_exits_with_0_and_shows_what_workers_wrote(launch: Launch) -> None:
    # Each line in one write: a print without a buffer writes the end of the line separately.
    job = launch(
        "sys.stdout.write(f'out {rank} of {size}\\n'); print(f'err {rank}', file=sys.stderr)", "--no-output-files"
    )
    assert job.wait() == [0]
    assert sorted(line for line in job.output().splitlines() if line.startswith("out")) == ["out 0 of 2", "out 1 of 2"]
    assert job.of(events.JobEnded)[0].event.outcome == "completed"


@pytest.mark.parametrize("options", [(), pytest.param(("--log-dir", "logs"), marks=pytest.mark.slow)])
def test_output_goes_to_the_terminal_and_to_a_file_for_each_cycle_and_rank(
    launch: Launch, tmp_path: Path, options: tuple[str, ...]
) -> None:
    options = tuple(str(tmp_path / option) if option == "logs" else option for option in options)
    job = launch("print(f'cycle {cycle} rank {rank}'); sys.exit(rank == 1 and cycle == 0)", *options)
    assert job.wait() == [0]
    shown = job.output().splitlines()
    assert {"cycle 0 rank 1", "cycle 1 rank 0", "cycle 1 rank 1"} <= set(shown)
    assert (job.job.run / "output" / "1" / "1.out").read_text() == "cycle 1 rank 1\n"


@pytest.mark.parametrize(
    "how",
    [
        "sys.exit(3)",
        pytest.param("os._exit(1)", marks=pytest.mark.slow),
        "os.kill(os.getpid(), 9)",
        "raise ValueError('no')",
    ],
)
def test_failed_worker_starts_a_new_cycle_of_all(launch: Launch, how: str) -> None:
    script = f"if cycle == 0 and rank == 1: {how}\nif cycle == 0: await_file('never')"
    job = launch(script, SLOW_ANSWERS="yes")
    assert job.wait() == [0]
    assert [record.event.why for record in job.of(events.CycleStarted)] == ["first", "failure"]
    ended = [record.event for record in job.of(events.CycleEnded)]
    assert [event.outcome for event in ended] == ["failed", "completed"]
    interrupted = [record.event.record for record in job.of(events.RankInterrupted)]
    kind = Interruption.EXCEPTION if how.startswith("raise") else Interruption.TERMINATED
    assert [(record.rank, record.interruption) for record in interrupted] == [(1, kind)]
    exits = {(r.origin.cycle, r.event.worker_rank): r.event for r in job.of(events.WorkerExited)}
    assert not exits[0, 1].expected
    assert exits[0, 0].expected and exits[0, 0].signal == "SIGTERM"
    assert exits[1, 0].code == exits[1, 1].code == 0


def test_rank_may_go_on_after_the_others_have_completed_for_as_long_as_it_needs(launch: Launch) -> None:
    script = "if rank: sys.exit()\nawait_file('go')\ntime.sleep(1.0)\nsay('exported')"
    job = launch(script, per_agent=({"LONG": "yes"},))
    job.await_record(events.WorkerExited)  # that of rank 1
    (job.folder / "go").touch()
    assert job.wait() == [0]
    assert (job.folder / "exported.0.0").exists()


def test_worker_in_an_uninterruptible_wait_for_torchs_limit_is_killed_and_has_failed(launch: Launch) -> None:
    script = """
    import ctypes
    if cycle == 0 and rank == 0:
        libc = ctypes.PyDLL(None)
        if libc.vfork() == 0:  # the parent waits in state D
            libc.sleep(100)
            libc._exit(0)
    elif cycle == 0:
        await_file("never")
    """
    job = launch(script, per_agent=({"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "1"},))
    assert job.wait() == [0]
    (warned,) = job.of(events.NodeWarned)
    assert f"process {job.worker_pid(0)} is killed: in an uninterruptible wait" in warned.event.detail
    assert "for 1 s (TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT)" in warned.event.detail
    exits = {(r.origin.cycle, r.event.worker_rank): r.event for r in job.of(events.WorkerExited)}
    assert (exits[0, 0].signal, exits[0, 0].expected, exits[0, 1].expected) == ("SIGKILL", False, True)


def test_exit_with_0_long_before_the_others_is_no_success_if_there_is_a_limit(launch: Launch) -> None:
    job = launch(
        "if cycle == 0: raise ValueError('early')\nif rank: await_file('never')", "--exit-barrier-timeout", "0.2"
    )
    assert job.wait() == [1]
    last_words = job.output(stream=2).partition("resilience run: the job ")[2]
    assert "premature completion: rank 0 ended well, and others did not within 0.2 s" in last_words
    assert "ValueError" not in last_words  # the job recovered from it


def test_file_timers_leave_no_file_of_any_cycle(launch: Launch) -> None:
    job = launch(
        "print(os.environ['TORCHELASTIC_TIMER_FILE'], flush=True)\nsys.exit(3 + cycle if cycle < 2 else 0)",
        nproc=1,
        per_agent=({"TORCHELASTIC_ENABLE_FILE_TIMER": "1"},),
    )
    assert job.wait() == [0]
    files = job.output().splitlines()
    assert len(set(files)) == 3
    assert not any(map(os.path.exists, files))


def test_file_timers_that_cannot_be_started_are_why_workers_cannot_start(launch: Launch, tmp_path: Path) -> None:
    timers = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": str(tmp_path)}  # a folder
    job = launch("", per_agent=(timers,))
    assert job.wait() == [1]
    (ended,) = job.of(events.JobEnded)
    assert ended.event.detail.startswith("the workers cannot be started: [Errno 21] Is a directory")


def test_job_without_restarts_left_ends_with_1_and_says_what_failed(launch: Launch) -> None:
    job = launch("sys.exit(rank)", "--max-restarts", "1")
    assert job.wait() == [1]
    assert len(job.of(events.CycleStarted)) == 2
    (ended,) = job.of(events.JobEnded)
    assert (ended.event.outcome, ended.event.exit_code) == ("exhausted", 1)
    assert "rank 1" in job.output(stream=2)
    assert "resilience report" in job.output(stream=2)


def test_worker_that_ignores_sigterm_is_killed_after_the_shutdown_timeout(launch: Launch) -> None:
    job = launch(
        """
        if cycle == 0 and rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            say("deaf")
            await_file("never")
        if cycle == 0:
            await_file("deaf.0.0")
            sys.exit(1)
        """,
        "--shutdown-timeout",
        "1",
    )
    assert job.wait() == [0]
    exits = {(r.origin.cycle, r.event.worker_rank): r.event for r in job.of(events.WorkerExited)}
    assert exits[0, 0].signal == "SIGKILL"


def test_agents_death_leaves_no_process(launch: Launch) -> None:
    job = launch("say('up'); await_file('never')")
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    pids = [job.worker_pid(rank) for rank in range(2)]
    job.job.signal(0, signal.SIGKILL)
    job.wait_agent(0)
    for pid in pids:
        await_end(pid)
    job.job.ran_to_its_end = True


def await_end(pid: int) -> None:
    """Wait until a process is gone or a zombie."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(20_000), f"process {pid} goes on"
    os.close(pidfd)


def test_third_identical_failure_without_progress_ends_the_job_with_a_table_and_93(launch: Launch) -> None:
    script = "import resilience; resilience.step(5)\nif rank: raise ValueError('bad batch')\nawait_file('never')"
    job = launch(script, SLOW_ANSWERS="yes")
    assert job.wait() == [93]
    assert len(job.of(events.CycleStarted)) == 3
    said = job.output(stream=2)
    assert "3 times in a row without progress beyond step 5" in said
    assert "ValueError: bad batch" in said
    assert "script.py:" in said
    decided = [record.event.verdict for record in job.of(events.RestartDecided)]
    assert decided == ["restart", "restart", "stop"]


def test_progress_between_identical_failures_goes_on_to_the_ceiling(launch: Launch) -> None:
    job = launch(
        "import resilience; resilience.step(cycle)\nif rank: raise ValueError('bad batch')\nawait_file('never')",
        "--max-restarts",
        "4",
    )
    assert job.wait() == [1]
    assert len(job.of(events.CycleStarted)) == 5


CHECKPOINT = """
import resilience
resilience.stop_requested()
say("up")
while not resilience.stop_requested():
    time.sleep(0.005)
say("saved")
"""


def test_sigterm_to_the_agent_gives_all_workers_time_for_a_checkpoint(launch: Launch) -> None:
    job = launch(CHECKPOINT)
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    job.job.signal(0, signal.SIGTERM)
    assert job.wait() == [128 + signal.SIGTERM]
    assert {path.name for path in job.folder.glob("saved.*")} == {"saved.0.0", "saved.0.1"}
    assert [record.event.code for record in job.of(events.WorkerExited)] == [0, 0]
    assert job.of(events.RankInterrupted) == []
    (ended,) = job.of(events.JobEnded)
    assert ended.event.outcome == "preempted"


def test_workers_that_do_not_look_are_ended_without_waiting_for_the_grace(launch: Launch) -> None:
    job = launch("say('up'); await_file('never')", "--stop-grace", "600")
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    job.job.signal(0, signal.SIGINT)
    assert job.wait() == [128 + signal.SIGINT]
    assert [record.event.signal for record in job.of(events.WorkerExited)] == ["SIGINT", "SIGINT"]


def test_grace_is_over_when_it_is_over(launch: Launch) -> None:
    script = "import resilience; resilience.stop_requested(); say('up'); await_file('never')"
    job = launch(script, "--stop-grace", "0.3")
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    job.job.signal(0, signal.SIGTERM)
    assert job.wait() == [128 + signal.SIGTERM]
    assert [record.event.signal for record in job.of(events.WorkerExited)] == ["SIGTERM", "SIGTERM"]


def test_what_workers_leave_behind_is_collected_while_they_run(launch: Launch) -> None:
    job = launch(
        """
        if os.fork() == 0:
            orphan = os.fork()
            if orphan:
                (here / "orphan.new").write_text(str(orphan))
                (here / "orphan.new").rename(here / "orphan")
            else:
                await_file("end")
            os._exit(0)
        os.wait()
        await_file("go")
        """,
        nproc=1,
    )
    job.job.await_sign_file(job.folder / "orphan")
    orphan = psutil.Process(int((job.folder / "orphan").read_text()))
    (job.folder / "end").touch()
    deadline = time.monotonic() + 20.0
    while psutil.pid_exists(orphan.pid):  # a zombie exists
        assert time.monotonic() < deadline, orphan.status()
        time.sleep(0.01)
    (job.folder / "go").touch()
    assert job.wait() == [0]


def test_job_whose_zygote_hangs_restarts_cold_and_a_line_says_why(launch: Launch) -> None:
    job = launch("sys.exit(cycle == 0 and 3)", nproc=1, SILENT_ZYGOTE="yes")
    assert job.wait() == [0]
    reasons = ["the zygote did not fork within 0.55 s", "the zygote has not answered an earlier order yet"]
    started = [record.event for record in job.of(events.WorkerStarted)]
    assert [(event.how, event.why_cold) for event in started] == [("cold", reason) for reason in reasons]
    assert [record.event.why for record in job.of(events.WorkersNotForked)] == reasons
    assert f"workers start cold this time: {reasons[0]}" in job.output(stream=2)
    assert job.of(events.ZygoteLost) == []


def test_death_of_the_zygote_disturbs_no_worker_and_the_next_ones_start_cold(launch: Launch) -> None:
    job = launch("say('up')\nawait_file('go')\nsys.exit(cycle == 0 and 3)", nproc=1)
    job.await_worker("up.0.0")
    child_named(job.job.pids[0], "resilience-zygote").kill()
    job.await_record(events.ZygoteLost)
    (job.folder / "go").touch()
    assert job.wait() == [0]
    exits = [record.event for record in job.of(events.WorkerExited)]
    assert [(event.code, event.expected) for event in exits] == [(3, False), (0, True)]
    assert [record.event.how for record in job.of(events.WorkerStarted)] == ["warm", "cold"]
    (lost,) = job.of(events.ZygoteLost)
    assert lost.event.why == "the zygote is gone (SIGKILL)"


def test_lists_of_processes_name_rank_node_and_script(launch: Launch) -> None:
    job = launch("say('up')\nawait_file('go')")
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
        worker = psutil.Process(job.worker_pid(rank))
        assert worker.name() == f"rank{rank} script.py"
        assert worker.cmdline() == [f"rank {rank} on node0: {sys.executable}", "-u", str(job.folder / "script.py")]
        environment = worker.environ()
        assert [environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == [str(rank), str(rank), "2"]
    names = {
        *("rank0 script.py", "rank1 script.py", "res-monitor 0", "res-monitor 1"),
        *("res-zygote", "res-store", "res-drain"),
    }
    commands = {
        "res-zygote": "resilience-zygote",
        "res-store": "resilience-store",
        "res-monitor 1": "resilience-monitor: rank 1 on node0",
    }
    shown: dict[str, str] = {}
    deadline = time.monotonic() + 60.0
    while not (shown.keys() == names and commands.items() <= shown.items()):  # each names itself as it begins
        assert time.monotonic() < deadline, shown
        time.sleep(0.05)
        with contextlib.suppress(psutil.NoSuchProcess):
            others = psutil.Process(job.job.pids[0]).children()
            shown = {process.name(): " ".join(process.cmdline()) for process in others}
    (job.folder / "go").touch()
    assert job.wait() == [0]


def test_keys_of_rdzv_conf_that_have_no_effect_are_named(launch: Launch) -> None:
    job = launch("", "--rdzv-conf", "joint_timeout=5,read_timeout=30", nproc=1)
    assert job.wait() == [0]
    assert "--rdzv-conf joint_timeout, read_timeout: no effect on this back end" in job.output(stream=2)


# -- few descriptors ------------------------------------------------------------------------------------------------

FAILS_TWICE = """
say("up")
if cycle < 2:
    await_file(f"crash.{cycle}")
    sys.exit(rank)
"""


def test_limit_of_open_files_too_low_for_a_restart_is_named_at_the_start(launch: Launch) -> None:
    job = launch("pass", OPEN_FILES="34")
    job.wait()
    assert "a restart may fail: the agent of 2 workers needs 20 open files" in job.output(stream=2)


@pytest.mark.parametrize("phase", ["gate", "spawn"])
def test_restart_waits_for_descriptors_that_the_agent_lacks_for_a_moment(
    launch: Launch, tmp_path: Path, phase: Any
) -> None:
    """Checks before a cycle need one or two, and the start of two workers more than the last ones give back."""
    job = launch(FAILS_TWICE, SLOW_ANSWERS="yes")
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    agent = job.job.pids[0]
    _, hard = resource.prlimit(agent, resource.RLIMIT_NOFILE)
    least = 12 if phase == "gate" else len(os.listdir(f"/proc/{agent}/fd")) - 4
    resource.prlimit(agent, resource.RLIMIT_NOFILE, (least, hard))
    (tmp_path / "crash.0").touch()
    (tmp_path / "crash.1").touch()
    job.await_record_of(1, events.CyclePhaseStarted(phase))
    resource.prlimit(agent, resource.RLIMIT_NOFILE, (hard, hard))
    assert job.wait() == [0], job.output(stream=2)
    assert [record.event.outcome for record in job.of(events.CycleEnded)] == ["failed", "failed", "completed"]


def test_store_process_without_descriptors_gives_those_of_the_last_cycle_to_the_next_one(
    launch: Launch, tmp_path: Path
) -> None:
    """Its limit leaves room for the job's store and that of one cycle, but not for a second one."""
    job = launch(FAILS_TWICE)
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    store = child_named(job.job.pids[0], "res-store").pid
    await_servers(store, 3)
    limit = len(os.listdir(f"/proc/{store}/fd")) - 2  # a server has more: that of this cycle gives some back
    resource.prlimit(store, resource.RLIMIT_NOFILE, (limit, limit))
    (tmp_path / "crash.0").touch()
    (tmp_path / "crash.1").touch()
    assert job.wait() == [0], job.output(stream=2)
    assert [record.event.outcome for record in job.of(events.CycleEnded)] == ["failed", "failed", "completed"]


def await_servers(pid: int, count: int) -> None:
    """Wait until a process hosts so many stores, each of which has accepted its host's own client."""
    deadline = time.monotonic() + 60.0
    while True:
        connections = psutil.Process(pid).net_connections()
        listening = {at.laddr.port for at in connections if at.status == "LISTEN"}
        connected = {at.raddr.port for at in connections if at.raddr}
        accepted = {at.laddr.port for at in connections if at.raddr}
        if len(listening & connected & accepted) >= count:
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)
