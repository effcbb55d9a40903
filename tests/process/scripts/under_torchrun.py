"""Fails once on rank 1, is restarted in place, and prints what came out. Run by torchrun."""

import os
import sys

import torch
import torch.distributed as dist

from resilience.inprocess import CallWrapper, Wrapper


@Wrapper()
def train(call: CallWrapper | None = None) -> float:
    assert call is not None
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    if call.iteration == 0 and dist.get_rank() == 1:
        raise ValueError("by schedule")
    dist.all_reduce(ones)
    dist.destroy_process_group()
    return float(ones)


before = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
sys.stdout.write(f"result {train()}\n")  # in one piece, for two write to one pipe
assert before == {name: os.environ[name] for name in before}
