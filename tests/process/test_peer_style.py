"""Scripts written for the compatible API run with the import changed, however they are started."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from resilience.facts import events
from tests.support.account import Account
from tests.support.ranks import free_port

SCRIPTS = Path(__file__).parent / "scripts" / "peer_style"
LIMIT = 240.0  # seconds
START: Mapping[str, list[str]] = {
    "torchrun": ["-m", "torch.distributed.run", "--rdzv-backend=c10d"],
    "resilience run": ["-m", "resilience.launcher", "--standalone"],
}


@contextlib.contextmanager
def process(command: list[str], folder: Path, **more: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a process group of its own; end what is left of it."""
    environment = {
        **os.environ,
        "RESILIENCE_RUN_DIR": str(folder / "runs"),
        "RESILIENCE_JOB_ID": "job",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RES_OPTIONS": "timeout:1 attempts:1",
        **more,
    }
    with (folder / f"out{more.get('RANK', '')}").open("w+") as output:
        started = subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            start_new_session=True,
        )
        try:
            yield started
        finally:
            children = _children(started.pid)
            started.kill()  # neither signals a process that has the pid of one that ended
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            started.wait()


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def run(
    how: str, script: Path, folder: Path, ranks: int = 2, arguments: Sequence[str] = (), options: Sequence[str] = ()
) -> tuple[list[int], str]:
    """Start the script on `ranks` ranks, wait for it; return exit codes, and all that was written. arguments: the
    script's, after the folder. options: the launcher's."""
    with ExitStack() as stack:
        port = str(free_port())  # the scripts bind the next one
        if how == "plain":
            there = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            started = [
                stack.enter_context(
                    process(
                        [str(script), str(folder), *arguments], folder, RANK=str(rank), LOCAL_RANK=str(rank), **there
                    )
                )
                for rank in range(ranks)
            ]
        else:
            # By default torchrun draws MASTER_PORT, and the next one may be any client's.
            static = ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={port}"]
            meeting = static if how == "torchrun" else []
            command = [
                *START[how],
                *meeting,
                f"--nproc-per-node={ranks}",
                *options,
                str(script),
                str(folder),
                *arguments,
            ]
            started = [stack.enter_context(process(command, folder))]
        deadline = time.monotonic() + LIMIT
        codes = []
        for each in started:
            try:
                codes.append(each.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(-1)
        return codes, "".join(path.read_text(errors="replace") for path in sorted(folder.glob("out*")))


def await_monitors(folder: Path, ranks: int) -> Account:
    """Wait until every rank's monitor has written its last words."""
    account, deadline = Account(folder / "runs" / "job"), time.monotonic() + 60
    ended: set[int | None] = set()
    while ended != set(range(ranks)):
        assert time.monotonic() < deadline, f"only the monitors of ranks {ended} have ended"
        time.sleep(0.05)
        ended = {
            record.origin.initial_rank
            for record in account.records()
            if isinstance(record.event, events.MonitorEnded) and record.origin.role == "monitor"
        }
    return account


HOW = ("plain", "torchrun", "resilience run")
RECOVERS = (
    ("basic", 2, ["done in iteration 1 size 2"] * 2),
    ("advanced", 2, ["done in iteration 1 size 2 from step 3"] * 2),
    ("composed", 3, ["done in iteration 2 size 2"] * 2),
    ("nested", 2, ["done in iteration 1 size 2"] * 2),
)
QUICK = {("basic", "resilience run"), ("composed", "plain")}


@pytest.mark.parametrize(
    ("how", "name", "ranks", "says"),
    [
        pytest.param(how, *case, marks=[] if (case[0], how) in QUICK else pytest.mark.slow, id=f"{case[0]}-{how}")
        for how in HOW
        for case in RECOVERS
    ],
)
def test_script_in_the_style_of_the_compatible_api_recovers(
    tmp_path: Path, how: str, name: str, ranks: int, says: list[str]
) -> None:
    codes, output = run(how, SCRIPTS / f"{name}.py", tmp_path, ranks)
    assert set(codes) == {0}, output
    assert [line for line in output.splitlines() if line.startswith("done")] == says, output
    await_monitors(tmp_path, ranks)


@pytest.mark.parametrize(
    ("fault", "options", "says"),
    [
        ("exc", [], "done in iteration 1 size 2 from step 1"),
        # The launcher's new workers are in their first iteration.
        pytest.param("sigkill", [], "done in iteration 0 size 2 from step 1", marks=pytest.mark.slow),
        pytest.param(
            "sleep",
            ["--ft-rank-heartbeat-timeout=10", "--ft-initial-rank-heartbeat-timeout=120"],
            "done in iteration 0 size 2 from step 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_script_of_both_layers_recovers(tmp_path: Path, fault: str, options: list[str], says: str) -> None:
    codes, output = run("resilience run", SCRIPTS / "both_layers.py", tmp_path, arguments=[fault], options=options)
    assert codes == [0], output
    assert output.count(says) == 2, output


@pytest.mark.slow
def test_hook_for_completion_runs_on_every_rank(tmp_path: Path) -> None:
    codes, output = run("plain", SCRIPTS / "nested.py", tmp_path)
    assert codes == [0, 0], output
    assert sorted(path.name for path in tmp_path.glob("completed-*")) == ["completed-0", "completed-1"]
