"""Our rendezvous under stock torchrun, which finds it by its name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.ranks import free_port

SCRIPT = Path(__file__).parent / "scripts" / "fails_once.py"


@contextmanager
def torchrun(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start torchrun with our rendezvous; it is ended with the test."""
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=resilience", "--rdzv-id=job"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", *arguments, str(SCRIPT), str(folder / "failed")]
    env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_torchrun_restarts_workers_with_our_rendezvous(tmp_path: Path) -> None:
    with torchrun(tmp_path, "--rdzv-endpoint=localhost:0", "--nproc-per-node=2") as job:
        out, err = job.communicate(timeout=100)
    assert (job.returncode, out.count("result 2.0 of 2")) == (0, 2), err


@pytest.mark.slow
def test_two_torchruns_restart_together_with_our_rendezvous(tmp_path: Path) -> None:
    """Stock torchrun fails at this: its workers meet over keys of the cycle before."""
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    with ExitStack() as ending:
        jobs = [ending.enter_context(torchrun(tmp_path, "--nnodes=2", endpoint)) for _ in range(2)]
        told = [job.communicate(timeout=55) for job in jobs]
    for job, (out, err) in zip(jobs, told, strict=True):
        assert (job.returncode, out.count("result 2.0 of 2")) == (0, 1), err
