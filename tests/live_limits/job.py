"""A small training job of the matrix. `python job.py PLAN`: what it shows and how long it takes stands in the plan."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import resilience


def main(plan_path: str) -> None:
    plan = json.loads(Path(plan_path).read_text())
    rank, cycle = int(os.environ["RANK"]), int(os.environ["RESILIENCE_CYCLE"])
    client = None
    if plan["shows"] == "heartbeat":
        from resilience.fault_tolerance import RankMonitorClient

        client = RankMonitorClient()
        client.init_workload_monitoring()
    time.sleep(plan.get("load", 0.0))
    for n in range(plan["steps"]):
        if [cycle, rank, n] == plan.get("crash"):
            sys.exit(3)
        seconds = duration(n, rank, plan)
        if client is not None:
            wait_for(n, rank, cycle)
            time.sleep(seconds)
            client.send_heartbeat()
        elif plan["shows"] == "section":
            with resilience.section("train"):
                wait_for(n, rank, cycle)
                time.sleep(seconds)
        else:
            wait_for(n, rank, cycle)
            resilience.step(n)
            time.sleep(seconds)
    if client is not None:
        client.shutdown_workload_monitoring()


def wait_for(n: int, rank: int, cycle: int) -> None:
    """Hang if the environment says so: [cycle, rank, step]. The command stays the same, because known phases hold for
    equal arguments only."""
    if [cycle, rank, n] == json.loads(os.environ.get("HANG", "null")):
        Path(os.environ["HANG_MARK"]).write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGSTOP)


def duration(n: int, rank: int, plan: dict[str, object]) -> float:
    """Return how long a step takes."""
    seconds = float(plan["step"])  # type: ignore[arg-type]
    if rank in plan.get("slow_ranks", ()):  # type: ignore[operator]
        seconds *= 3
    for what in ("first", "tenth", "hundredth", "checkpoint"):
        every = {"first": 10**9, "tenth": 10, "hundredth": 100, "checkpoint": 400}[what]
        if what in plan and n % every == (0 if what == "first" else every - 1):
            seconds = max(seconds, float(plan[what]))  # type: ignore[arg-type]
    return seconds


if __name__ == "__main__":
    main(sys.argv[1])
