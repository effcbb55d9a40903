"""What counts as a failure: ends of workers that look like something else."""

from __future__ import annotations

import importlib
import io
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from resilience.facts import events
from resilience.launcher.worker import tied
from resilience.system.channel import close_all
from tests.process.launching import Launched, launcher
from tests.process.told import only_incident, told
from tests.support.ranks import Job
from tests.support.stops import kill, stop

Launch = Callable[..., Launched]


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    return launcher(start, tmp_path)


# -- a worker that was ended for a hang -----------------------------------------------------------------

HANGS_AND_EXITS_WITH_0 = """
import resilience
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
resilience.heartbeat()
if cycle == 0 and rank == 0:
    await_file("never")
"""


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_worker_that_exits_with_0_when_it_is_ended_for_a_hang_has_failed(launch: Launch, nproc: int) -> None:
    limits = ("--ft-rank-heartbeat-timeout", "6", "--ft-rank-termination-signal", "SIGTERM")
    job = launch(HANGS_AND_EXITS_WITH_0, *limits, nproc=nproc, SLOW_ANSWERS="yes")
    assert job.wait() == [0]
    assert [record.event.outcome for record in job.of(events.CycleEnded)] == ["failed", "completed"]
    exits = {(r.origin.cycle, r.event.worker_rank): r.event for r in job.of(events.WorkerExited)}
    assert (exits[0, 0].code, exits[0, 0].expected) == (0, False)
    incident = only_incident(job)
    assert (incident.kind, incident.verdict.first, incident.status) == ("hard_timeout", 0, "restarted")


def test_job_that_only_hangs_and_has_no_restart_left_does_not_exit_with_0(launch: Launch) -> None:
    limits = ("--ft-rank-heartbeat-timeout", "6", "--ft-rank-termination-signal", "SIGTERM")
    job = launch(HANGS_AND_EXITS_WITH_0, *limits, "--max-restarts", "0", nproc=1, SLOW_ANSWERS="yes")
    assert job.wait() == [1]
    assert job.of(events.JobEnded)[0].event.outcome == "exhausted"


# -- a program that cannot start ------------------------------------------------------------------------

BROKEN = "def f(:\n    pass\n"
QUICK = ("no such script", "syntax error", "no such module in a package", "looks for a stop", "asked")
CANNOT_START = {
    "no such script": ("missing.py", "there is no file"),
    "syntax error": ("broken.py", "invalid syntax"),
    "syntax error in a module": ("imports_broken.py", "SyntaxError"),
    "no such module": ("-m no_such_module", "there is no module no_such_module"),
    "no such module in a package": ("-m package.no_such_module", "there is no module package.no_such_module"),
    "syntax error in the module": ("-m package.broken", "invalid syntax"),
    "import of an unknown module": ("imports_missing.py", "ModuleNotFoundError"),
}


@pytest.fixture
def run(start: Callable[..., Job], tmp_path: Path) -> Callable[[str], Launched]:
    """Run a command line in a folder of programs, most of which cannot start."""
    programs = tmp_path / "programs"
    (programs / "package").mkdir(parents=True)
    for path, text in {
        "broken.py": BROKEN,
        "imports_broken.py": "import broken\n",
        "imports_missing.py": "import package\nimport no_such_module\n",
        "imports_late.py": "def main():\n    import no_such_module\n\nmain()\n",
        "fails.py": "raise ValueError('a bad batch')\n",
        "usage.py": "import argparse\nargparse.ArgumentParser().parse_args()\n",
        "package/__init__.py": "",
        "package/broken.py": BROKEN,
        "package/fails.py": "import sys\nsys.exit(3)\n",
    }.items():
        (programs / path).write_text(text)

    def run(program: str) -> Launched:
        env = {"RESILIENCE_JOB_ID": "job", "RESILIENCE_NODE": "node0", "FOLDER": str(programs), "SLOW_ANSWERS": "yes"}
        arguments = ["--nproc-per-node", "2", *program.split()]
        job = start(1, "tests.process.launching:agent", env=env, are_agents=True, arguments=arguments)
        return Launched(job, tmp_path, "job")

    return run


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CANNOT_START]
)
def test_program_that_cannot_start_is_tried_once_and_named(run: Callable[[str], Launched], case: str) -> None:
    program, words = CANNOT_START[case]
    job = run(program)
    assert job.wait() == [1]
    assert len(job.of(events.CycleStarted)) == 1
    (decided,) = job.of(events.RestartDecided)
    assert (decided.event.verdict, decided.event.restarts_used) == ("stop", 0)
    assert words in decided.event.why
    assert words in job.output(stream=2)


def test_program_that_rejects_its_arguments_is_started_three_times_and_not_eleven(
    run: Callable[[str], Launched],
) -> None:
    job = run("usage.py --no-such-option")
    assert job.wait() == [93]
    assert len(job.of(events.CycleStarted)) == 3
    *_, decided = job.of(events.RestartDecided)
    assert (decided.event.verdict, decided.event.fingerprint, decided.event.same_in_a_row) == ("stop", "exit:2", 3)
    assert "usually means wrong arguments" in decided.event.why
    assert "unrecognized arguments: --no-such-option" in job.output(stream=2)


def test_program_that_is_not_there_is_named_without_a_traceback(run: Callable[[str], Launched]) -> None:
    job = run("--no-python no_such_program")
    assert job.wait() == [1]
    assert job.of(events.JobEnded)[0].event.outcome == "failed"
    said = job.output(stream=2)
    assert "the workers cannot be started: [Errno 2] No such file or directory: 'no_such_program'" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo here\n", "[Errno 8] Exec format error"),
        pytest.param("#!/no/such/interpreter\n", "[Errno 2] No such file or directory", marks=pytest.mark.slow),
    ],
)
def test_program_that_the_kernel_refuses_is_tried_once_and_named(
    run: Callable[[str], Launched], tmp_path: Path, text: str, words: str
) -> None:
    program = tmp_path / "programs" / "refused"
    program.write_text(text)
    program.chmod(0o755)
    job = run("--no-python ./refused")
    assert job.wait() == [1]
    assert len(job.of(events.CycleStarted)) == 1
    assert f"the workers cannot be started: {words}: './refused'" in job.output(stream=2)


def test_program_whose_path_leads_through_a_file_fails_the_job_and_excludes_no_node(
    launch: Launch, tmp_path: Path
) -> None:
    program = tmp_path / "script.py" / "program"
    job = launch("", "--no-python", str(program), nodes="1:2", agents=2, nproc=1)
    assert job.wait() == [1, 1]
    assert job.of(events.NodeUnhealthy) == []
    assert f"the workers cannot be started: [Errno 20] Not a directory: '{program}'" in job.output(stream=2)


@pytest.mark.parametrize(
    "program",
    [
        "fails.py",
        *(pytest.param(program, marks=pytest.mark.slow) for program in ("imports_late.py", "-m package.fails")),
    ],
)
def test_program_that_started_and_failed_is_started_again(run: Callable[[str], Launched], program: str) -> None:
    job = run(program)
    assert job.wait()[0] != 0
    assert len(job.of(events.CycleStarted)) > 1


FAILS_ONCE = "import os\nif os.environ['RESILIENCE_CYCLE'] == '0':\n    raise ValueError('a bad batch')\n"


def packed(kind: str) -> bytes:
    """Return a program that fails in cycle 0, in a form that only its content shows."""
    if kind == "compiled code":
        return importlib._bootstrap_external._code_to_timestamp_pyc(compile(FAILS_ONCE, "fails_once.py", "exec"))  # type: ignore[attr-defined]
    file = io.BytesIO(b"#!/usr/bin/env python\n" if kind == "zip with an interpreter" else b"")
    file.seek(0, io.SEEK_END)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("__main__.py", FAILS_ONCE)
    return file.getvalue()


@pytest.mark.parametrize(
    "kind",
    ["zip with an interpreter", *(pytest.param(each, marks=pytest.mark.slow) for each in ("zip", "compiled code"))],
)
def test_packed_program_without_an_ending_runs_and_is_started_again_when_it_fails(
    run: Callable[[str], Launched], tmp_path: Path, kind: str
) -> None:
    (tmp_path / "programs" / "train").write_bytes(packed(kind))
    job = run("train")
    assert job.wait() == [0], job.output(stream=2)
    assert {record.event.why_cold for record in job.of(events.WorkerStarted)} == {"the script is an archive"}
    assert [record.event.outcome for record in job.of(events.CycleEnded)] == ["failed", "completed"]


# -- a script that reports no step ----------------------------------------------------------------------

KILLED_AGAIN_AND_AGAIN = """
checkpoint = here / f"checkpoint.{rank}"
if cycle < 5:
    checkpoint.write_text(str(cycle))
    (here / f"written.{rank}.{cycle}").touch()
    if rank == 0:
        await_file(f"written.1.{cycle}")
        os.kill(os.getpid(), signal.SIGKILL)
    await_file("never")
assert checkpoint.read_text() == "4"
"""


@pytest.mark.slow
def test_script_that_reports_no_step_and_is_killed_five_times_completes(launch: Launch) -> None:
    job = launch(KILLED_AGAIN_AND_AGAIN)
    assert job.wait() == [0]
    decided = [record.event for record in job.of(events.RestartDecided)]
    assert [(each.verdict, each.same_in_a_row) for each in decided] == [("restart", 1)] * 5


def test_exception_that_comes_again_ends_a_script_that_reports_no_step_with_93(launch: Launch) -> None:
    job = launch("def work(): raise ValueError('a bad batch')\nwork()", SLOW_ANSWERS="yes")
    assert job.wait() == [93]
    assert len(job.of(events.CycleStarted)) == 3
    assert "this script reports no step" in job.output(stream=2)


# -- nothing survives the launcher ----------------------------------------------------------------------

DEAF = """
import ctypes
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
of_parents_death = ctypes.c_int()
assert ctypes.CDLL(None).prctl(2, ctypes.byref(of_parents_death), 0, 0, 0) == 0  # PR_GET_PDEATHSIG
(here / f"tie.{rank}").write_text(f"{of_parents_death.value} {os.getppid()}")
say("up")
while True:
    time.sleep(60)
"""


def has_not_ended(process: psutil.Process) -> bool:
    """Return True unless the process is gone, or is a zombie, as under a stopped parent."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def await_ends(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait until these have ended. Return those that have not."""
    until = time.monotonic() + 60.0
    while (alive := [each for each in processes if has_not_ended(each)]) and time.monotonic() < until:
        time.sleep(0.01)
    return alive


@pytest.mark.parametrize("order", ["at once", "the agent last"])
@pytest.mark.parametrize("how", ["warm", "cold"])
def test_no_worker_survives_when_all_processes_of_the_launcher_are_killed_at_once(
    launch: Launch, how: str, order: str
) -> None:
    """The kernel ends each worker as its parent, the agent, dies. No time is measured: a busy machine would break that.
    Nothing else can end them: they ignore signals, and every process that knows them is stopped when the agent dies."""
    job = launch(DEAF, *(["--cold"] if how == "cold" else []))
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    workers = [psutil.Process(job.worker_pid(rank)) for rank in range(2)]
    assert {record.event.how for record in job.of(events.WorkerStarted)} == {how}
    agent = psutil.Process(job.job.pids[0])
    ties = {(job.folder / f"tie.{rank}").read_text() for rank in range(2)}
    assert ties == {f"{signal.SIGKILL:d} {agent.pid}"}  # the signal for the death of the parent, and the parent
    others = [each for each in agent.children(recursive=True) if each not in workers]
    assert len(others) >= 3  # the store process and two monitors
    stop(agent.pid, *(each.pid for each in others))  # so that none acts on the death of another one
    if order == "at once":
        kill([agent, *others])
    else:
        kill(others)
        assert await_ends(others) == [] and all(has_not_ended(each) for each in workers)
        kill([agent])
    _, alive = psutil.wait_procs(workers, timeout=60.0)
    kill(alive)
    assert alive == []
    job.wait_agent(0)
    job.job.ran_to_its_end = True


def test_program_that_is_tied_to_its_parent_starts_as_it_would_without() -> None:
    show = (
        "/bin/sh",
        "-c",
        "grep -a 'Sig[^Q]' /proc/self/status; ls /proc/self/fd; tr '\\0' '\\n' </proc/self/environ; echo $0 $@",
        "a b",
        "c  d",
    )
    reading, writing = os.pipe()
    tie = (sys.executable, "-I", "-S", tied.__file__, str(os.getpid()), "64", str(writing))
    env = {b"PATH": b"/usr/bin:/bin", b"LC_ALL": b"C", b"BYTES": b"\xff"}
    seen = [
        subprocess.run([*way, *show], env=env, pass_fds=passed, capture_output=True, check=True).stdout
        for way, passed in (((), ()), (tie, (writing,)))
    ]
    close_all([reading, writing])
    assert seen[0] == seen[1] != b""


def test_what_a_worker_has_started_ends_with_the_agent_and_the_agent_is_named(launch: Launch) -> None:
    job = launch(
        """
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (here / "child.new").write_text(str(os.getpid()))
            (here / "child.new").rename(here / "child")
            while True:
                time.sleep(60)
        await_file("never")
        """,
        nproc=1,
    )
    job.job.await_sign_file(job.folder / "child")
    child = psutil.Process(int((job.folder / "child").read_text()))
    job.job.signal(0, signal.SIGKILL)
    job.wait_agent(0)
    _, alive = psutil.wait_procs([child], timeout=60.0)
    kill(alive)
    assert alive == []
    job.await_record(events.MonitorEnded)
    incident = only_incident(job, killed="node0")
    assert incident.records[0].message == "the agent of node0 is gone"
    job.job.ran_to_its_end = True


# -- SIGTERM to a worker --------------------------------------------------------------------------------

UP_AND_ON = {
    "dies": "if cycle == 0:\n    say('up'); await_file('never')",
    "looks for a stop": """
import resilience
resilience.stop_requested()
if cycle == 0:
    say("up")
    while not resilience.stop_requested():
        time.sleep(0.005)
    sys.exit()
""",
}


@pytest.mark.parametrize("policy", [pytest.param("any-failed", marks=pytest.mark.slow), "min-healthy"])
@pytest.mark.parametrize(
    "worker", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in UP_AND_ON]
)
def test_sigterm_to_one_worker_alone_is_its_failure(launch: Launch, worker: str, policy: str) -> None:
    job = launch(UP_AND_ON[worker], "--ft-restart-policy", policy)
    await_workers(job, "up")
    os.kill(job.worker_pid(1), signal.SIGTERM)
    assert job.wait() == [0]
    assert [record.event.why for record in job.of(events.CycleStarted)] == ["first", "failure"]
    exits = {(r.origin.cycle, r.event.worker_rank): r.event for r in job.of(events.WorkerExited)}
    assert (exits[0, 1].signal, exits[0, 1].expected, exits[0, 0].expected) == ("SIGTERM", False, True)
    assert [record.event.fingerprint for record in job.of(events.RestartDecided)] == ["signal:SIGTERM"]
    assert job.of(events.StopRequested) == []


@pytest.mark.parametrize(
    "worker", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in UP_AND_ON]
)
def test_sigterm_to_the_workers_is_a_preemption_if_their_agent_is_signalled_within_a_second(
    launch: Launch, worker: str
) -> None:
    job = launch(UP_AND_ON[worker])
    await_workers(job, "up")
    workers, agent = [job.worker_pid(rank) for rank in range(2)], job.job.pids[0]
    stop(agent)  # so that it finds all three signals
    for pid in (*workers, agent):
        os.kill(pid, signal.SIGTERM)
    os.kill(agent, signal.SIGCONT)
    assert job.wait() == [128 + signal.SIGTERM]
    assert (told(job).incidents, job.of(events.RestartDecided)) == ((), [])
    assert job.of(events.JobEnded)[0].event.outcome == "preempted"


# -- stopping -------------------------------------------------------------------------------------------

STOPS_WHEN_ASKED = """
import resilience
resilience.stop_requested()
say("up")
while not resilience.stop_requested():
    time.sleep(0.005)
"""
HEARS = """
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: say("terminated"))
say("up")
while True:
    time.sleep(1)
"""


def test_second_ctrl_c_ends_the_time_for_a_checkpoint(launch: Launch) -> None:
    job = launch(STOPS_WHEN_ASKED + "say('saves')\nawait_file('never', 600)", "--stop-grace", "600")
    await_workers(job, "up", "saves", first=lambda: job.job.signal(0, signal.SIGINT))
    job.job.signal(0, signal.SIGINT)
    assert job.wait() == [128 + signal.SIGINT]
    assert [record.event.signal for record in job.of(events.WorkerExited)] == ["SIGINT", "SIGINT"]


def test_second_ctrl_c_kills_workers_that_do_not_heed_the_first(launch: Launch) -> None:
    job = launch(HEARS, "--shutdown-timeout", "600")
    await_workers(job, "up", "terminated", first=lambda: job.job.signal(0, signal.SIGINT))
    job.job.signal(0, signal.SIGINT)
    assert job.wait() == [128 + signal.SIGINT]
    assert [record.event.signal for record in job.of(events.WorkerExited)] == ["SIGKILL", "SIGKILL"]


def test_second_sigterm_takes_no_time_from_a_checkpoint(launch: Launch) -> None:
    job = launch(STOPS_WHEN_ASKED + "say('saves')\nawait_file('saved')", "--stop-grace", "600")
    await_workers(job, "up", "saves", first=lambda: job.job.signal(0, signal.SIGTERM))
    job.job.signal(0, signal.SIGTERM)
    (job.folder / "saved").touch()
    assert job.wait() == [128 + signal.SIGTERM]
    assert [record.event.code for record in job.of(events.WorkerExited)] == [0, 0]


ENDS_WELL = {
    "asked": STOPS_WHEN_ASKED,
    "handler": "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nsay('up')\nawait_file('never')",
}


@pytest.mark.parametrize(
    "how", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in ENDS_WELL]
)
def test_preemption_that_all_workers_end_with_0_is_reported_as_a_clean_one_and_exits_with_143(
    launch: Launch, how: str
) -> None:
    job = launch(ENDS_WELL[how])
    await_workers(job, "up")
    job.job.signal(0, signal.SIGTERM)
    assert job.wait() == [128 + signal.SIGTERM]
    (ended,) = job.of(events.JobEnded)
    assert (ended.event.outcome, ended.event.is_clean) == ("preempted", True)
    assert "the job was preempted cleanly; all workers exited with status 0" in job.output(stream=2)
    found = told(job)
    assert (found.completed, found.stopped, found.incidents) == ((), (0, 1), ())
    assert "preempted cleanly, exit status 143" in found.end


def test_preemption_in_which_a_worker_had_to_be_ended_is_no_clean_one(launch: Launch) -> None:
    job = launch(STOPS_WHEN_ASKED + "if rank: sys.exit(3)")
    await_workers(job, "up")
    job.job.signal(0, signal.SIGTERM)
    assert job.wait() == [128 + signal.SIGTERM]
    (ended,) = job.of(events.JobEnded)
    assert (ended.event.outcome, ended.event.is_clean) == ("preempted", False)
    assert "preempted cleanly" not in job.output(stream=2) + told(job).end


def await_workers(job: Launched, name: str, then: str = "", first: Callable[[], None] = lambda: None) -> None:
    """Wait until both workers have said `name`; with `then`, call `first` and wait until they have said that."""
    for rank in range(2):
        job.await_worker(f"{name}.0.{rank}")
    if then:
        first()
        await_workers(job, then)
