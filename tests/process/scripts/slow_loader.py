"""Trains a toy on 4 ranks; rank 1's loader stops now and then, and once rank 2 is killed from outside.

Arguments: the file of the checkpoint. What breaks is chosen by the cycle, so that the story is the same each time."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import resilience

STEPS, CHECKPOINT = 120, 10
HANGS = {0: 23, 2: 47, 3: 71, 4: 93}  # cycle -> step at which rank 1's loader gets no more data
KILLED = (1, 35)  # cycle, step at which rank 2 is gone


def next_batch(step: int) -> torch.Tensor:
    time.sleep(0.02)
    if rank == 1 and HANGS.get(cycle) == step:
        time.sleep(3600.0)  # the storage does not answer
    return torch.full((8,), float(step))


dist.init_process_group("gloo")
rank, cycle = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
log, path = resilience.get_logger(), Path(sys.argv[1])
first = int(path.read_text()) if path.exists() else 0
log.info("starts", from_step=first)
for step in range(first, STEPS):
    resilience.step(step)
    with resilience.section("data"):
        batch = next_batch(step)
    if rank == 2 and (cycle, step) == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    with resilience.section("reduce"):
        dist.all_reduce(batch)
    if step % CHECKPOINT == 0:
        with resilience.section("checkpoint"):
            time.sleep(0.05)
            if rank == 0:
                path.write_text(str(step))
            log.info("checkpoint written", step=step)
dist.destroy_process_group()
