"""A training script that logs, prints and fails once, on rank 1; for tests that read what a run leaves behind."""

import os
import sys

import torch
import torch.distributed as dist

import resilience
from resilience.inprocess import CallWrapper, Wrapper


@Wrapper()
def train(call: CallWrapper) -> None:
    log = resilience.get_logger(part="train")
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    log.info("ready", shard=rank, nested={"a": [1, 2]})
    print("plain line of a worker", flush=True)
    for step in range(5):
        resilience.step(step)
        with resilience.section("reduce"):
            dist.all_reduce(torch.ones(1))
        if step == 3 and call.iteration == 0 and rank == 1:
            log.warning("about to fail", reason="planned")
            raise ValueError("planned")
    dist.destroy_process_group()
    sys.stderr.write("no newline at the end")


train()
