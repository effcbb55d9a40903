"""The wrapper under stock torchrun, whose agent hosts the store."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from resilience.facts import events
from tests.support.account import Account

SCRIPT = Path(__file__).parent / "scripts" / "under_torchrun.py"


def test_function_restarts_in_place_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    env = dict(os.environ, RESILIENCE_RUN_DIR=str(tmp_path), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("result 4.0") == 2
    (run,) = tmp_path.iterdir()
    account, deadline = Account(run), time.monotonic() + 30
    left: set[int | None] = set()
    while left != {0, 1}:  # their last words: no monitor stays behind
        left = {r.origin.initial_rank for r in account.records() if isinstance(r.event, events.MonitorEnded)}
        assert time.monotonic() < deadline, f"only the monitors of ranks {left} have ended within 30 s"
        time.sleep(0.05)
