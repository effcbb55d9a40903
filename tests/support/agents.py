"""A job under `resilience run` as people start it: one command a node, each a process of its own on this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.ranks import free_port
from tests.support.server import ROOT

LIMIT = 280.0  # seconds for the whole job


def run_job(
    folder: Path,
    script: str,
    nodes: int,
    per_node: int,
    env: Mapping[str, str],
    env_of: Callable[[str], Mapping[str, str]] = lambda node: {},
) -> Path:
    """Run a script of tests/process/scripts to its end on nodes a, b …; return the run folder.

    folder: for runs and output. env: of all agents; env_of: of the one of that node."""
    command = [sys.executable, "-m", "resilience.cli", "run", "--nproc-per-node", str(per_node)]
    if nodes > 1:
        command += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-id", "test"]
        command += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    own = {"RESILIENCE_RUN_DIR": str(folder / "runs"), "RESILIENCE_JOB_ID": "job", "OMP_NUM_THREADS": "1"}
    children = []
    for number in range(nodes):
        node = chr(ord("a") + number)
        each = [*command, *(["--rdzv-conf", f"is_host={int(not number)}"] if nodes > 1 else [])]
        each.append(str(ROOT / "tests/process/scripts" / script))
        named = {**os.environ, **own, "PYTHONPATH": str(ROOT), "RESILIENCE_NODE": node, **env, **env_of(node)}
        with (folder / f"{node}.txt").open("wb") as out:
            children.append(subprocess.Popen(each, env=named, stdout=out, stderr=out, start_new_session=True))
    try:
        for number, child in enumerate(children):
            output = folder / f"{chr(ord('a') + number)}.txt"
            assert child.wait(LIMIT) == 0, output.read_text()
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    return folder / "runs" / "job"
