"""The harness itself: ranks start from one process, every end is known, nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.ranks import Job, started
from tests.support.server import ROOT, ForkServer

Start = Callable[..., Job]
JOBS = "tests.process.harness_jobs"


def test_ranks_know_their_place_and_start_with_a_single_thread(start: Start) -> None:
    job = start(3, f"{JOBS}:tell", env={"EXTRA": "all"}, env_of=lambda rank: {"EXTRA": "one"} if rank == 1 else {})
    values = [rank.value for rank in job.wait_ranks()]
    assert [value["rank"] for value in values] == [0, 1, 2]
    assert [value["extra"] for value in values] == ["all", "one", "all"]
    assert {(v["world_size"], v["is_own_group"], v["threads"], v["native_threads"]) for v in values} == {
        (3, True, 1, 1)
    }
    assert "on stdout" in job.output()


@pytest.mark.parametrize(("with_code", "code", "kind"), [(None, 1, "ValueError"), (3, 3, "SystemExit")])
def test_error_of_a_rank_comes_back(start: Start, with_code: int | None, code: int, kind: str) -> None:
    finished = start(1, f"{JOBS}:fail", with_code=with_code).wait_ranks()[0]
    assert (finished.code, finished.signal, finished.type) == (code, None, kind)


def test_signal_that_ended_a_rank_is_known(start: Start) -> None:
    job = start(2, f"{JOBS}:wait_for_ever")
    job.await_sign("waiting", rank=1)
    job.signal(1, signal.SIGTERM)
    finished = job.wait_rank(1)
    assert finished is not None
    assert (finished.code, finished.signal, finished.value) == (None, signal.SIGTERM, None)
    assert job.wait_rank(0, limit=0.0) is None


def test_ranks_hold_until_the_test_lets_them_on(start: Start) -> None:
    job = start(2, f"{JOBS}:hold_twice")
    for name in ("first", "second"):
        for rank in range(2):
            job.await_sign(name, rank)
        assert not job.finished
        job.let_on(name)
    assert [rank.value for rank in job.wait_ranks()] == [["first", "second"]] * 2


def test_ranks_that_run_on_or_are_stopped_end_with_the_test(fork_server: ForkServer, tmp_path: Path) -> None:
    with started(fork_server, tmp_path, 2, f"{JOBS}:wait_for_ever") as job:
        for rank in range(2):
            job.await_sign("waiting", rank)
        job.signal(1, signal.SIGSTOP)
    assert [os.WTERMSIG(fork_server.ended[pid]) for pid in job.pids] == [signal.SIGKILL] * 2


def test_process_that_a_finished_job_leaves_running_is_ended_and_named(fork_server: ForkServer, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"left running by a finished job: \d+ sleep") as failure:
        leave_a_child_behind(fork_server, tmp_path)
    pid = int(str(failure.value).split(": ")[1].split()[0])
    assert not psutil.pid_exists(pid)


def leave_a_child_behind(fork_server: ForkServer, folder: Path) -> None:
    with started(fork_server, folder, 1, f"{JOBS}:leave_a_child") as job:
        job.wait_ranks()
        job.ran_to_its_end = True
        job.leave_limit = 0.1


def test_ranks_end_when_the_test_session_is_killed(tmp_path: Path) -> None:
    """The session's death closes the server's stdin; the server's end takes the ranks along."""
    script = (
        "import sys; from pathlib import Path; from tests.support.ranks import started, ForkServer\n"
        f"with started(ForkServer(), Path({str(tmp_path)!r}), 1, '{JOBS}:wait_for_ever') as job:\n"
        "    job.await_sign('waiting', 0); print(job.pids[0], flush=True); sys.stdin.read()"
    )
    session = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert session.stdin is not None
    assert session.stdout is not None
    rank = psutil.Process(int(session.stdout.readline()))
    session.kill()
    session.wait(120)
    session.stdin.close()
    session.stdout.close()
    assert psutil.wait_procs([rank], 120)[1] == []
