"""What a person reads at a terminal of 80 columns: where the records are, one line for each restart, and the command
that explains the job."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from resilience.facts import events
from tests.process.launching import launcher
from tests.process.test_faults import fault
from tests.process.test_launcher_nodes import await_restart_line
from tests.support.pids import has_ended
from tests.support.ranks import Job, free_port
from tests.support.server import ROOT

LIMIT = 240.0
OURS = [sys.executable, "-m", "resilience.launcher", "--run-dir", "runs"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
SCRIPT = """
import os, pathlib, signal, sys, time
import resilience
rank, cycle = int(os.environ["RANK"]), int(os.environ["RESILIENCE_CYCLE"])
while cycle and not pathlib.Path("go").exists():  # until the test has seen the line of the restart
    time.sleep(0.01)
for step in range(10):
    resilience.step(step)
"""
WRAPPED = """
import os, signal, time, torch, torch.distributed as dist
from resilience.inprocess import CallWrapper, Wrapper

def await_go():  # the test has seen the line of the restart
    until = time.monotonic() + 100
    while not os.path.exists("go") and time.monotonic() < until:
        time.sleep(0.01)

@Wrapper()
def train(call: CallWrapper = None):
    if call.iteration or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        await_go()
    dist.init_process_group("gloo")
    for step in range(6):
        if (call.iteration, step, os.environ["RANK"]) == (0, 3, "1"):
            raise ValueError("bad batch")
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()

train()
"""
FORKING = """
import os, sys
from resilience.inprocess import Wrapper

@Wrapper()
def train():
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)

train()
"""


class Terminal:
    """A terminal of 80 columns with a command in it."""

    def __init__(self, command: Sequence[str], folder: Path, **env: str) -> None:
        self._screen, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env}
        self.child = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *command],
            cwd=folder,
            env={**os.environ, **environment},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        self._shown = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: its other end is closed
            while piece := os.read(self._screen, 4096):
                self._shown += piece

    def press(self, key: bytes) -> None:
        os.write(self._screen, key)

    def wait(self) -> int:
        """Wait for the command's end, and for what it has written. Return its exit status."""
        status = self.child.wait(LIMIT)
        self._reader.join(LIMIT)
        return status

    @property
    def text(self) -> str:
        return self._shown.decode().replace("\r\n", "\n")

    @property
    def lines(self) -> list[str]:
        """Ours: those that begin with `resilience`, and the command on a line of its own."""
        found = (re.search(r"(resilience( run)?: .*|  resilience report .*)$", line) for line in self.text.split("\n"))
        return [line[0] for line in found if line is not None and "hang detection: " not in line[0]]

    def close(self) -> None:
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()
        self._reader.join(LIMIT)
        os.close(self._screen)


# Keys become signals for the group of a session that has the terminal.
IN_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as a shell has it, also where the tests run in the background
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""

Open = Callable[..., Terminal]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Open]:
    opened: list[Terminal] = []

    def start(command: Sequence[str], script: str, **env: str) -> Terminal:
        path = tmp_path / "train.py"
        path.write_text(script)
        opened.append(Terminal([*command, str(path)], tmp_path, **env))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def let_end(folder: Path, text: str, *jobs: Terminal) -> None:
    """Let a job that was restarted come to its end, once one of its terminals shows this text."""
    until = time.monotonic() + LIMIT
    while not any(text in job.text for job in jobs):
        assert time.monotonic() < until, [job.text for job in jobs]
        time.sleep(0.01)
    (folder / "go").touch()


def the_run(folder: Path) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found


# -- the launcher -------------------------------------------------------------------------------------


def test_job_says_where_its_records_are_and_which_command_explains_it(terminal: Open, tmp_path: Path) -> None:
    job = terminal([*OURS, "--nproc-per-node", "2"], SCRIPT)
    assert job.wait() == 0, job.text
    run = the_run(tmp_path)
    assert job.lines == [
        f"resilience run: 2 ranks on 1 node; records in {run}",
        "resilience run: completed; to see what happened:",
        f"  resilience report {run}",
    ]


@pytest.mark.slow
def test_report_without_an_argument_takes_the_newest_run(terminal: Open, tmp_path: Path) -> None:
    for name in ("first", "second"):
        assert terminal(OURS, SCRIPT, RESILIENCE_JOB_ID=name).wait() == 0
    told = subprocess.run(
        [sys.executable, "-m", "resilience.cli", "report"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RESILIENCE_RUN_DIR": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    assert told.stdout.startswith("Run second")


def test_restart_is_one_line_that_names_who_failed_first(terminal: Open, tmp_path: Path) -> None:
    script = SCRIPT + "\nif cycle == 0 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
    job = terminal([*OURS, "--nproc-per-node", "2"], script)
    let_end(tmp_path, "restart 1 of 10", job)
    assert job.wait() == 0, job.text
    _, *between, end, _ = job.lines
    assert between == ["resilience run: restart 1 of 10: rank 1 failed first (SIGKILL), 2 ranks on 1 node"]
    assert end == "resilience run: completed after 1 restart by the launcher; to see what happened:"


def test_hang_is_named_with_its_limit(terminal: Open, tmp_path: Path) -> None:
    script = SCRIPT + "\nif cycle == 0 and rank == 1: time.sleep(1000)"
    job = terminal([*OURS, "--nproc-per-node", "2", "--ft-step-timeout", "2"], script)
    let_end(tmp_path, "restart 1 of 10", job)
    assert job.wait() == 0, job.text
    (line,) = [line for line in job.lines if "restart 1" in line]
    assert "rank 1 failed first (hung: step limit 2 s" in line


def test_job_that_fails_ends_with_who_failed_first_and_the_command(terminal: Open, tmp_path: Path) -> None:
    script = SCRIPT + "\nif rank: raise ValueError('bad')\ntime.sleep(60)"
    job = terminal([*OURS, "--nproc-per-node", "2", "--max-restarts", "0"], script)
    assert job.wait() == 1
    last = job.text.split("resilience run: the job failed")[1]
    assert "  rank 1 failed first (ValueError: bad)\n" in last
    assert job.lines[-1] == f"  resilience report {the_run(tmp_path)}"


def test_ctrl_c_ends_with_the_command(terminal: Open, tmp_path: Path) -> None:
    job = terminal(OURS, SCRIPT + "\npathlib.Path('up').touch()\ntime.sleep(1000)")
    until = time.monotonic() + LIMIT
    while not (tmp_path / "up").exists():
        assert time.monotonic() < until, job.text
        time.sleep(0.01)
    job.press(b"\x03")
    assert job.wait() == 130, job.text
    assert [line.partition(" (")[0].partition(": SIG")[0] for line in job.lines[1:]] == [
        "resilience run: the job stops",
        "resilience run: the job was asked to stop",
        f"  resilience report {the_run(tmp_path)}",
    ]


def test_two_nodes_say_a_restart_once(terminal: Open, tmp_path: Path) -> None:
    there = f"localhost:{free_port()}"
    shared = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", there, "--rdzv-id", "two"]
    script = SCRIPT + "\nif cycle == 0 and rank == 1: sys.exit(3)"
    jobs = [terminal([*OURS, *shared], script, RESILIENCE_NODE=name) for name in ("a", "b")]
    let_end(tmp_path, "restart 1 of 10", *jobs)
    assert [job.wait() for job in jobs] == [0, 0], [job.text for job in jobs]
    lines = [line for job in jobs for line in job.lines]
    (restart,) = [line for line in lines if "restart 1 of 10" in line]
    assert re.search(r"rank 1 on [ab] failed first \(exit code 3\), 2 ranks on 2 nodes", restart)
    assert sum("resilience run: completed" in line for line in lines) == 1


def test_rank_that_is_found_first_is_not_blamed_for_another_ones_end(start: Callable[..., Job], tmp_path: Path) -> None:
    """Both end while the agent is stopped, so it finds rank 0 first; but rank 0 only saw the end of rank 1."""
    job = launcher(start, tmp_path)(
        """
if cycle == 0:
    say("up")
    await_file("go")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise ConnectionResetError("Connection reset by peer")
await_file("line")
""",
        SLOW_ANSWERS="yes",
    )
    job.await_worker("up.0.0")
    job.await_worker("up.0.1")
    workers = [job.worker_pid(0), job.worker_pid(1)]
    job.job.signal(0, signal.SIGSTOP)
    (job.folder / "go").touch()
    for pid in workers:
        await_end(pid)
    job.job.signal(0, signal.SIGCONT)
    await_restart_line(job, "restart 1 of 10")
    (job.folder / "line").touch()
    assert job.wait() == [0], job.job.output()
    assert "restart 1 of 10: rank 1 failed first (SIGKILL)" in job.output(stream=2)


def await_end(pid: int) -> None:
    """Wait until a process has ended, whether its parent has noticed that or not."""
    until = time.monotonic() + 60
    while not has_ended(pid):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
def test_job_that_runs_for_more_than_a_minute_prints_nothing_of_the_wait_for_its_end(
    terminal: Open, tmp_path: Path
) -> None:
    """torch's client prints two lines for each wait that times out."""
    job = terminal([*OURS, "--nproc-per-node", "1"], "import time\ntime.sleep(70)\n")
    assert job.wait() == 0, job.text
    assert "socket.cpp" not in job.text and "timed out" not in job.text


# -- a Wrapper ----------------------------------------------------------------------------------------


def test_wrapper_under_torchrun_says_start_restart_and_command(terminal: Open, tmp_path: Path) -> None:
    job = terminal([*TORCHRUN, "--nproc-per-node", "2"], WRAPPED, RESILIENCE_RUN_DIR="runs")
    let_end(tmp_path, "restart 1 in place", job)
    assert job.wait() == 0, job.text
    run = the_run(tmp_path)
    assert job.lines == [
        f"resilience: records in {run}",
        "resilience: restart 1 in place: rank 1 failed first (ValueError: bad batch), 2 ranks continue",
        "resilience: completed after 1 restart in place; to see what happened:",
        f"  resilience report {run}",
    ]
    assert job.text.count("resilience: hang detection: once a rank has reported progress, 600 s ") == 1


OF_A_LATER_RELEASE = """
import os, time
from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess.initialize import Initialize

def await_line(restart):  # the test has seen it
    until = time.monotonic() + 100
    while not os.path.exists(restart) and time.monotonic() < until:
        time.sleep(0.01)

class Prepare(Initialize):
    def __call__(self, state):
        if state.iteration:
            await_line(str(state.iteration - 1))
        if 0 < state.iteration < 3:
            state.fn_exception
        return state

@Wrapper(initialize=Prepare())
def train(call: CallWrapper = None):
    if call.iteration == 0:
        open("0", "w").close()
        raise ValueError("bad batch")
    await_line("3")

train()
"""


def test_restart_that_fails_in_a_hook_before_the_function_is_one_line(terminal: Open, tmp_path: Path) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = terminal([sys.executable], OF_A_LATER_RELEASE, RESILIENCE_RUN_DIR="runs", **world)
    for restart in (1, 2, 3):
        let_end(tmp_path, f"restart {restart} in place", job)
        (tmp_path / str(restart)).touch()
    assert job.wait() == 0, job.text
    first, *others = [line for line in job.lines if "in place: " in line]
    assert first == "resilience: restart 1 in place: rank 0 failed first (ValueError: bad batch), 1 rank continues"
    for restart, line in enumerate(others, 2):
        assert line.startswith(f"resilience: restart {restart} in place: rank 0 failed first (AttributeError: "), line
    assert len(others) == 2


def test_wrapper_under_our_launcher_ends_with_its_restarts_in_place(terminal: Open, tmp_path: Path) -> None:
    job = terminal([*OURS, "--nproc-per-node", "2"], WRAPPED)
    let_end(tmp_path, "restart 1 in place", job)
    assert job.wait() == 0, job.text
    assert "resilience run: completed after 1 restart in place; to see what happened:" in job.lines


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_are_one_line(terminal: Open, tmp_path: Path) -> None:
    script = WRAPPED.replace('raise ValueError("bad batch")', "os.kill(os.getpid(), signal.SIGKILL)")
    script = script.replace("(call.iteration, step", '(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), step')
    job = terminal([*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1"], script, RESILIENCE_RUN_DIR="runs")
    let_end(tmp_path, "started again by the launcher", job)
    assert job.wait() == 0, job.text
    told = [line for line in job.lines if "started again by the launcher (cycle 1)" in line]
    assert len(told) == 1 and "rank 1 failed first (SIGKILL), 2 ranks continue" in told[0]


# What leaves the call on some ranks, and what the last line says of the end.
ENDS = {
    "all ranks leave": ("sys.exit(3)", 1, "failed (SystemExit)"),
    "rank 1 is killed": ("if rank == 1: os.kill(os.getpid(), 9)", 1, "rank 0 ended (SIGTERM)"),
    "rank 0 is killed": ("if rank == 0: os.kill(os.getpid(), 9)", 1, "rank 0 ended (SIG"),
    "rank 1 leaves": ("if rank == 1: sys.exit(0)", 0, "completed after 1 restart in place"),
    "rank 0 leaves": ("if rank == 0: sys.exit(0)", 0, "completed after 1 restart in place"),
    "all ranks leave before the function starts again": ("1 / 0", 1, "failed (SystemExit); to see what happened"),
    "rank 0 is excluded": ("if rank == 0: 1 / 0", 0, "completed after 1 restart in place"),
}
ENDING = """
import os, sys, time, torch, torch.distributed as dist
from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess.health_check import HealthCheck
from tests.support.pids import has_ended

rank = int(os.environ["RANK"])
if rank == 0:
    with open("pid", "w") as file:
        file.write(str(os.getpid()))

class Check(HealthCheck):
    def __call__(self, state, exc=None):
        if exc is not None and rank == 0 and "excluded" in sys.argv[1]:
            raise RuntimeError("sick")
        if exc is None and state.iteration == 1 and "again" in sys.argv[1]:
            sys.exit(3)
        return state, exc

@Wrapper(health_check=Check())
def train(call: CallWrapper = None):
    dist.init_process_group("gloo")
    for step in range(6):
        if (call.iteration, step) == (0, 3):
            CASE
        if call.iteration and " killed" in sys.argv[1]:
            time.sleep(600)  # until torchrun ends it; the new rank 0 if it was fast, which the line then is about
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()

try:
    train()
except Exception:
    pass
finally:
    if rank == 1 and "all ranks leave" in sys.argv[1]:  # torchrun ends rank 0, which prints the line, if it is later
        until = time.monotonic() + 60
        while not has_ended(int(open("pid").read())) and time.monotonic() < until:
            time.sleep(0.01)
"""
QUICK_ENDS = ("rank 0 is killed",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK_ENDS else pytest.mark.slow) for case in ENDS]
)
def test_job_of_a_wrapper_under_torchrun_ends_with_one_line_and_the_command(
    terminal: Open, tmp_path: Path, case: str
) -> None:
    act, status, how = ENDS[case]
    script = ENDING.replace("CASE", act).replace("sys.argv[1]", repr(case))
    job = terminal([*TORCHRUN, "--nproc-per-node", "2"], script, RESILIENCE_RUN_DIR="runs")
    assert job.wait() == status, job.text
    (line,) = [line for line in job.lines if "to see what happened" in line]
    assert line.startswith(f"resilience: {how}"), job.text
    assert job.lines.count(f"  resilience report {the_run(tmp_path)}") == 1


def test_ranks_in_a_plain_environment_say_start_limits_restart_and_command_once(terminal: Open, tmp_path: Path) -> None:
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        terminal([sys.executable], WRAPPED, RANK=str(rank), RESILIENCE_RUN_DIR="runs", **world) for rank in range(2)
    ]
    let_end(tmp_path, "restart 1 in place", *ranks)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.text for rank in ranks]
    run = the_run(tmp_path)
    assert [line for rank in ranks for line in rank.lines] == [
        f"resilience: records in {run}",
        "resilience: restart 1 in place: rank 1 failed first (ValueError: bad batch), 2 ranks continue",
        "resilience: completed after 1 restart in place; to see what happened:",
        f"  resilience report {run}",
    ]
    assert (
        "".join(rank.text for rank in ranks).count(
            "resilience: hang detection: once a rank has reported progress, 600 s "
        )
        == 1
    )


@pytest.mark.slow
def test_ranks_whose_detection_of_hangs_is_switched_off_say_so_once(terminal: Open, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    job = terminal(
        [*TORCHRUN, "--nproc-per-node", "2"], WRAPPED, RESILIENCE_RUN_DIR="runs", RESILIENCE_DETECT_HANGS="0"
    )
    assert job.wait() == 0, job.text
    assert job.text.count("hang detection: off; only these limits are in force: main thread 60 s") == 1


def test_forked_child_that_leaves_the_function_prints_no_end_of_the_job(terminal: Open, tmp_path: Path) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = terminal([sys.executable], FORKING, RESILIENCE_RUN_DIR="runs", **world)
    assert job.wait() == 0, job.text
    run = the_run(tmp_path)
    assert job.lines == [
        f"resilience: records in {run}",
        "resilience: completed; to see what happened:",
        f"  resilience report {run}",
    ], job.text


# -- switched off, not read ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [[*OURS, "--quiet"], pytest.param(OURS, marks=pytest.mark.slow), pytest.param(TORCHRUN, marks=pytest.mark.slow)],
    ids=["--quiet", "variable", "torchrun"],
)
def test_all_of_it_can_be_switched_off(terminal: Open, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "go").touch()
    env = {} if "--quiet" in command else {"RESILIENCE_QUIET": "1"}
    job = terminal([*command, "--nproc-per-node", "2"], WRAPPED, RESILIENCE_RUN_DIR="runs", **env)
    assert job.wait() == 0, job.text
    assert "resilience" not in job.text


def test_unread_terminal_blocks_no_rank(start: Callable[..., Job]) -> None:
    job = start(2, "tests.process.jobs:train_unread", faults=[fault("exception")])
    assert all(rank.value is not None for rank in job.wait())


# -- status -------------------------------------------------------------------------------------------


def test_status_shows_the_pid_of_each_rank(start: Callable[..., Job], tmp_path: Path) -> None:
    job = launcher(start, tmp_path)("say('up')\nawait_file('go')")
    job.await_worker("up.0.0")
    job.await_worker("up.0.1")
    pids = [str(job.worker_pid(rank)) for rank in range(2)]
    for rank in range(2):
        job.job.await_record(events.MonitorStarted, rank=rank)  # which makes the rank known
    told = subprocess.run(
        [sys.executable, "-m", "resilience.cli", "status", str(job.job.run)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    header, *rows = [line.split() for line in told.stdout.split("\n")[-4:] if line]
    assert header[:2] == ["rank", "pid"]
    assert [row[:2] for row in rows] == [["0", pids[0]], ["1", pids[1]]]
    (job.folder / "go").touch()
    assert job.wait() == [0]
