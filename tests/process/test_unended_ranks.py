"""A hung rank that SIGKILL does not end costs only itself: here the init process of its container, as in a pod."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resilience.facts import events
from tests.support.ranks import Job, free_port
from tests.support.server import ForkServer

SCRIPT = """
import ctypes, os, time
from datetime import timedelta
from resilience.inprocess import CallWrapper, Wrapper

seconds = {name: timedelta(seconds=limit) for name, limit in LIMITS.items()}

@Wrapper(**seconds)
def train(call: CallWrapper = None):
    if call.iteration:
        return os.environ["WORLD_SIZE"]
    if os.environ["RANK"] == "1":  # as in a driver: no signal ends this wait
        library, mutex = ctypes.CDLL(None), (ctypes.c_uint64 * 8)()
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
    while True:
        time.sleep(0.1)

print("completed with", train(), "rank", flush=True)
"""
LIMITS = {
    "soft_timeout": 4.0,
    "hard_timeout": 6.0,
    "heartbeat_timeout": 8.0,
    "barrier_timeout": 60.0,
    "termination_grace_time": 1.0,
}


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare (util-linux)")
def test_others_go_on_without_a_rank_that_sigkill_does_not_end(tmp_path: Path, fork_server: ForkServer) -> None:
    script, port = tmp_path / "train.py", str(free_port())
    script.write_text(f"LIMITS = {LIMITS}\n{SCRIPT}")
    ranks = []
    for rank, container in enumerate(([], ["unshare", "-p", "-f", "--mount-proc", "--kill-child"])):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RESILIENCE_NODE": f"node{rank}",
            "RESILIENCE_RUN_DIR": str(tmp_path / "runs"),
        }
        ranks.append(
            subprocess.Popen(
                [*container, sys.executable, str(script)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    try:
        output, _ = ranks[0].communicate(timeout=240)
        assert output == "completed with 1 rank\n"
        assert ranks[1].poll() is None
        # The monitor of rank 1, which ends with its container, may see that the others went on after rank 0 has ended.
        job = Job(fork_server, tmp_path, "rank")
        stood_in = job.await_record(events.RankStoodInFor, rank=1).event
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
            assert process.stdout is not None
            process.stdout.close()
    assert isinstance(stood_in, events.RankStoodInFor) and stood_in.result == "excluded"
    signals = [record.event.signals for record in job.of(events.RankSignalled)]  # type: ignore[attr-defined]
    assert signals == [("SIGTERM", "SIGCONT"), ("SIGKILL",)]
