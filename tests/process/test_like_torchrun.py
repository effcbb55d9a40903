"""Whole jobs under torchrun and under `resilience run`: output of every worker and exit status are the same.

Each takes two cold starts of torch, which is why all are slow. What a worker sees is compared one thing a
time, and fast, in test_worker_semantics."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from resilience.facts import events
from tests.process.warming import SCRIPTS
from tests.support.account import Account
from tests.support.ranks import free_port

pytestmark = pytest.mark.slow

TORCHRUN = ("torch.distributed.run",)
OURS = ("resilience.launcher", "--max-restarts", "0")
# The same for both launchers, whose environments are compared, and short: loaders open Unix sockets in it.
TEMPORARY = Path("/tmp", f"like-torchrun-{os.getpid()}")
LIMIT = 110.0  # seconds


class Outcome(NamedTuple):
    """What is left of a job. codes: of workers that failed, by rank, as torchrun's last words have them."""

    status: int
    written: dict[str, str]
    codes: dict[int, int]
    shown: list[str]


@pytest.fixture(scope="module", autouse=True)
def temporary() -> Iterator[None]:
    TEMPORARY.mkdir()
    yield
    shutil.rmtree(TEMPORARY)


def run(launcher: Sequence[str], arguments: Sequence[str], folder: Path, cwd: Path, text: str, **env: str) -> Outcome:
    """Run a job to its end. Ours leaves nothing in the folder for temporary files."""
    folder.mkdir()
    (folder / "temporary").mkdir()
    before = set(TEMPORARY.iterdir())
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"RESILIENCE_RUN_DIR": str(folder / "runs"), "RESILIENCE_JOB_ID": "job", "GLOO_SOCKET_IFNAME": "lo"}
    environment["TMPDIR"] = str(TEMPORARY)
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *(each.replace("FOLDER", str(folder)) for each in arguments)],
        env={**environment, **env},
        cwd=cwd,
        input=text.encode(),
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )
    logs = sorted((folder / "logs").glob("**/std*.log"))
    error = done.stderr.decode()
    codes = {
        int(rank): int(code) for rank, code in re.findall(r"rank +: (\d+) \(local.*\n +exitcode +: (-?\d+)", error)
    }
    if launcher[0] == OURS[0]:
        codes = exit_codes(folder)
        assert set(TEMPORARY.iterdir()) <= before
    written = {f"{log.parent.name}/{log.name}": log.read_text(errors="surrogateescape") for log in logs}
    return Outcome(done.returncode, written, codes, sorted(done.stdout.decode(errors="replace").splitlines()))


def exit_codes(folder: Path) -> dict[int, int]:
    """Return what our account says of workers that failed by themselves; all were forked."""
    codes = {}
    for record in Account(folder / "runs" / "job").records():
        if isinstance(record.event, events.WorkerExited) and not record.event.expected:
            code, name = record.event.code, record.event.signal
            codes[record.event.worker_rank] = -signal.Signals[name].value if code is None and name else code or 0
    return codes


def how_started(folder: Path) -> set[str]:
    records = Account(folder / "runs" / "job").records()
    return {record.event.how for record in records if isinstance(record.event, events.WorkerStarted)}


def both(tmp_path: Path, *arguments: str, cwd: Path | None = None, text: str = "", **env: str) -> list[Outcome]:
    """Run a job under both launchers."""
    return [
        run(launcher, arguments, tmp_path / name, cwd or tmp_path, text, **env)
        for name, launcher in (("torchrun", TORCHRUN), ("ours", OURS))
    ]


IN_FILES = ("--standalone", "--redirects", "3", "--log-dir", "FOLDER/logs")
CASES = {
    "arguments": ("2", "arguments.py", "a b", "", "--timeout", "ünï"),
    "main_module": ("1", "main_module.py"),
    "imports": ("1", "imports.py", "FOLDER/temporary"),
    "pickled": ("1", "pickled.py"),
    "children": ("1", "children.py"),
    "loader": ("2", "loader.py"),
    "streams": ("1", "streams.py"),
    "environment": ("2", "environment.py"),
    "signals": ("2", "signals.py"),  # of one worker, ours has the threads of numpy, which is imported already
    "process": ("2", "process.py"),
    "command": ("1", "command.py"),
    "threads": ("1", "threads.py"),
    "threads of two": ("2", "threads.py"),
    "torch": ("1", "torch_state.py"),
    "group": ("2", "group.py"),
    "imports of torch": ("1", "hidden.py"),
    "variables that are computed": ("2", "late.py"),
    "variables in the source": ("2", "late_in_the_source.py"),
    "warnings": ("1", "warns.py"),
    "package": ("1", "-m", "package", "x y"),
    "module": ("1", "-m", "package.module"),
    "module that fails": ("1", "-m", "package.module", "x"),
    "no such module": ("1", "-m", "no_such_module"),
    "no such script": ("1", "no_such_script.py"),
    "thread": ("1", "ends.py", "thread"),
    "exit": ("1", "ends.py", "exit"),
    "exit-text": ("1", "ends.py", "exit-text"),
    "exit-now": ("1", "ends.py", "exit-now"),
    "exception": ("1", "ends.py", "exception"),
    "interrupt": ("1", "ends.py", "interrupt"),
    "kill": ("1", "ends.py", "kill"),
}


COLD = {"no such script", "variables in the source"}


@pytest.mark.parametrize("name", CASES)
def test_job_does_the_same(tmp_path: Path, name: str) -> None:
    workers, *arguments = CASES[name]
    theirs, ours = both(tmp_path, *IN_FILES, "--nproc-per-node", workers, *arguments, cwd=SCRIPTS, text="from stdin\n")
    assert ours.written == theirs.written
    assert ours.codes == theirs.codes
    assert ours.status == theirs.status
    assert how_started(tmp_path / "ours") == {"cold" if name in COLD else "warm"}


# Each line is one write, because the workers share a pipe. Where PYTHONUNBUFFERED is set, `print` writes each argument
# by itself, and then lines of two workers mix under either launcher.
LINES = """
import os, sys
for number in range(3):
    sys.stdout.write(f"line {number} of rank {os.environ['RANK']}\\n")
    sys.stdout.flush()
"""


@pytest.mark.parametrize("options", [[], ["--tee", "3", "--log-dir", "FOLDER/logs"]])
def test_output_is_shown_the_same(tmp_path: Path, options: list[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(LINES)
    arguments = (*options, "--standalone", "--nproc-per-node", "2", str(script))
    theirs = run(TORCHRUN, arguments, tmp_path / "theirs", tmp_path, "")
    ours = run((*OURS, "--no-output-files"), arguments, tmp_path / "ours", tmp_path, "")
    assert len(theirs.shown) == 6
    assert ours.shown == theirs.shown


def test_any_program_is_run_the_same(tmp_path: Path) -> None:
    program = ("--no-python", "/bin/sh", "-c", 'echo "$RANK: $0 $1"; exit $RANK', "a b", "c  d")
    theirs, ours = both(tmp_path, *IN_FILES, "--nproc-per-node", "2", *program)
    assert ours == theirs
    assert how_started(tmp_path / "ours") == {"cold"}


def test_environment_of_the_agent_reaches_the_libraries(tmp_path: Path) -> None:
    env = {"OMP_NUM_THREADS": "3", "PYTHONHASHSEED": "5", "TZ": "Asia/Kolkata"}
    script = tmp_path / "script.py"
    script.write_text("import time, torch\nprint(hash('x'), time.strftime('%z'), torch.get_num_threads())\n")
    theirs, ours = both(tmp_path, *IN_FILES, "--nproc-per-node", "2", str(script), **env)
    assert ours == theirs
    assert how_started(tmp_path / "ours") == {"warm"}


def test_nothing_but_torch_and_what_forks_is_imported_before_the_program(tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, *IN_FILES, "--nproc-per-node", "2", "modules.py", cwd=SCRIPTS)
    found = [set(json.loads(outcome.written["0/stdout.log"])) for outcome in (theirs, ours)]
    assert {name for name in found[1] - found[0] if not name.startswith("_")} <= {"resilience", "msgspec", "yaml"}
    assert found[0] - found[1] == set()


def test_launch_inside_a_worker_runs_the_same(tmp_path: Path) -> None:
    inner = tmp_path / "inner.py"
    inner.write_text(
        "import os, sys\nsys.stdout.write(f\"inner {os.environ['RANK']} {os.environ['WORLD_SIZE']}\\n\")\n"
    )  # in one write, as above
    script = tmp_path / "script.py"
    for place, launcher in (("theirs", TORCHRUN), ("ours", OURS)):
        command = [sys.executable, "-m", *launcher, "--standalone", "--nproc-per-node", "2", str(inner)]
        script.write_text(f"import subprocess\nprint('outer', flush=True)\nsubprocess.run({command!r}, check=True)\n")
        outcome = run(launcher, ("--standalone", "--nproc-per-node", "1", str(script)), tmp_path / place, tmp_path, "")
        assert (outcome.status, outcome.shown) == (0, ["inner 0 2", "inner 1 2", "outer"])
        assert len(list((tmp_path / place / "runs").glob("[!.]*"))) == (2 if place == "ours" else 0)


KILLED_FIVE_TIMES = """
import os, pathlib, signal, time
count = pathlib.Path(__file__).with_name(f"{os.environ['PLACE']}.{os.environ['RANK']}")
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
count.write_text(str(restarts))
if restarts < 5:
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
"""


def test_script_that_reports_no_step_gets_as_many_restarts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED_FIVE_TIMES)
    arguments = ("--standalone", "--max-restarts", "5", "--nproc-per-node", "2", str(script))
    for place, launcher in (("theirs", TORCHRUN), ("ours", OURS)):
        outcome = run(launcher, arguments, tmp_path / f"{place} run", tmp_path, "", PLACE=place)
        assert outcome.status == 0
        assert [(tmp_path / f"{place}.{rank}").read_text() for rank in range(2)] == ["5", "5"]


def test_sigterm_to_one_worker_is_a_failure_that_a_restart_mends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED_FIVE_TIMES.replace("SIGKILL", "SIGTERM").replace("< 5", "< 1"))
    arguments = ("--standalone", "--max-restarts", "1", "--nproc-per-node", "2", str(script))
    for place, launcher in (("theirs", TORCHRUN), ("ours", OURS)):
        outcome = run(launcher, arguments, tmp_path / f"{place} run", tmp_path, "", PLACE=place)
        assert outcome.status == 0
        assert [(tmp_path / f"{place}.{rank}").read_text() for rank in range(2)] == ["1", "1"]


ON_TWO_NODES = """
import os, pathlib, sys, time
here, size = pathlib.Path(os.environ["PLACE"]), os.environ["WORLD_SIZE"]
(here / f"up.{size}.{os.environ['RANK']}").touch()
until = time.monotonic() + 60
while size == "2" and time.monotonic() < until:
    if (here / "gone").exists():
        sys.exit(1)  # as a collective would fail
    time.sleep(0.01)
"""


@pytest.mark.parametrize("launcher", [TORCHRUN, OURS], ids=["torchrun", "ours"])
def test_node_goes_on_alone_when_the_agent_of_the_other_one_gets_sigterm(
    tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ON_TWO_NODES)
    options = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "1", "--rdzv-backend", "c10d")
    meeting = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "job")
    agents = []
    for number in range(2):
        conf = f"is_host={int(number == 0)},last_call_timeout=5,join_timeout=60"
        command = [sys.executable, "-m", *launcher, *options, *meeting, "--rdzv-conf", conf, str(script)]
        place = {"PLACE": str(tmp_path), "RESILIENCE_RUN_DIR": str(tmp_path / "runs"), "RESILIENCE_NODE": str(number)}
        agents.append(subprocess.Popen(command, env={**os.environ, **place}, stdin=subprocess.DEVNULL))
    try:
        await_files(tmp_path / "up.2.0", tmp_path / "up.2.1")
        agents[1].terminate()
        agents[1].wait(60)
        (tmp_path / "gone").touch()
        assert agents[0].wait(60) == 0
        assert (tmp_path / "up.1.0").exists()
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def await_files(*paths: Path) -> None:
    deadline = time.monotonic() + 60.0
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.01)
