"""Breaks one rank, once.  Uses the standard library and nothing of the package.

The truth lies in truth.json beside the job. The rank that it names breaks when it comes to the step. A file that says
so is written just before, so no fault strikes twice."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

SLOW_S = 0.8  # a slow step, within all limits
SIGNALS = {"sigkill": signal.SIGKILL, "sigterm": signal.SIGTERM, "sigstop": signal.SIGSTOP, "sigsegv": signal.SIGSEGV}


def strike(folder: Path, rank: int, step: int) -> None:
    """Break this rank, if it is its turn."""
    truth = json.loads((folder / "truth.json").read_text())
    if (rank, step) != (truth["rank"], truth["step"]):
        return
    try:
        (folder / "injected").open("x").write(str(time.time_ns()))
    except FileExistsError:
        return
    break_by(truth["fault"])


def break_by(fault: str) -> None:
    match fault:
        case "exception":
            raise ValueError("by schedule")
        case "exit":
            sys.stdout.flush()
            os._exit(7)
        case "sigkill" | "sigterm" | "sigstop" | "sigsegv":
            os.kill(os.getpid(), SIGNALS[fault])
            time.sleep(600 if fault == "sigterm" else 0)
        case "sleep":
            time.sleep(600)
        case "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "py_loop":
            spin()
        case "gil":
            ctypes.PyDLL(None).sleep(600)
        case "barrier":
            import torch.distributed as dist

            dist.barrier()
        case "slow":
            time.sleep(SLOW_S)


def spin() -> None:
    while True:
        pass
