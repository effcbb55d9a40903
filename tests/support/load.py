"""Processes that burn CPU, so that tests run as on a machine that is busy with something else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Ends by itself when the process that started it has gone, and after six hours at the latest.
BURN = """
import ctypes, os, signal, sys, time
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
end = time.monotonic() + 6 * 3600
while os.getppid() == int(sys.argv[1]) and time.monotonic() < end:
    sum(range(1_000_000))
"""


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many processes busy. They are ended by pid afterwards."""
    burners = [subprocess.Popen([sys.executable, "-c", BURN, str(os.getpid())]) for _ in range(processes)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
        for burner in burners:
            burner.wait()
