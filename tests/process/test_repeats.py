"""`resilience incidents` over real runs: the same fault is one fault, whichever rank, cycle or run it is in."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.process.launching import launcher
from tests.support.ranks import Job

SCRIPT = """
def load(number):
    raise ValueError(f"bad sample {number} in /data/{number}.bin")

if rank == cycle and cycle < 2: load(1000 * cycle + rank)
if cycle < 2: await_file("never")
"""


def test_exception_of_two_ranks_in_two_cycles_is_one_fault(start: Callable[..., Job], tmp_path: Path) -> None:
    job = launcher(start, tmp_path)(SCRIPT, "--max-restarts", "3", nproc=2)
    assert job.wait(120) == [0]
    told = subprocess.run(
        [sys.executable, "-m", "resilience.cli", "incidents", str(job.folder / "runs"), "--json"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    (fault,) = json.loads(told.stdout)
    assert (fault["count"], fault["what"], fault["ranks"]) == (2, "exception", {"0": 1, "1": 1})
