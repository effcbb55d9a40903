"""Jobs that break often, in many ways, and then go on until they are let go: something to look at."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import resilience
from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess.rank_filter import MaxActiveWorldSize

LIMITS = "train:4,save:1"  # seconds; `train` comes near its limit once, `save` exceeds it
NEAR = 3.0  # seconds
SPARES = 2
RESTARTS = 6
AT = 60  # step of each fault
END = "end"  # the file that lets a job end


def train_in_process() -> int:
    """Four exceptions, a killed rank and a hang, then steps until the file `end` is there."""

    @Wrapper(rank_filter=MaxActiveWorldSize(int(os.environ["WORLD_SIZE"]) - SPARES))
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        rank, iteration = int(os.environ["RANK"]), call.iteration
        step = 0
        while not Path(END).exists():
            resilience.step(step)
            resilience.heartbeat()
            with resilience.section("train"):
                time.sleep(0.05)
                if iteration < 4 and rank == 0 and step == AT:
                    raise ValueError("broken, by schedule")
                if iteration == 4 and rank == 0 and step == AT:
                    os.kill(os.getpid(), signal.SIGKILL)
                if iteration == RESTARTS and step == AT:
                    time.sleep(NEAR)
            if iteration == 5 and rank == 1 and step == AT:
                with resilience.section("save"):
                    time.sleep(60.0)
            step += 1
        return iteration

    return function()


# The same for the launcher, which ends it by the file named in its environment.
LAUNCHED = """
import resilience
step = 0
while not os.path.exists(os.environ["END"]):
    resilience.step(10 * cycle + step)
    resilience.heartbeat()
    with resilience.section("train"):
        time.sleep(0.05)
        if cycle == 0 and rank == 1 and step == 60:
            raise ValueError("broken, by schedule")
        if cycle == 2 and step == 60:
            time.sleep(3.0)
    if cycle == 1 and rank == 0 and step == 60:
        with resilience.section("save"):
            time.sleep(60.0)
    step += 1
"""
