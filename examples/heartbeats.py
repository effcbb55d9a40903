"""Heartbeats and steps under the launcher, which detects a rank that dies or hangs and restarts all at the checkpoint.

    resilience run --nproc-per-node 2 --ft-rank-heartbeat-timeout 10 --ft-step-timeout 20 \\
        examples/heartbeats.py --fault hang@25:1

Compared with 00_plain.py it adds two calls in the loop. A heartbeat says that the program lives, `resilience.step`
that it makes progress. Without either, the launcher notices ranks that die, but not ranks that hang. The fault may
also be exception@25:1 or kill@25:1."""

import os

import torch
import torch.distributed as dist
import workload
from torch.nn.parallel import DistributedDataParallel

import resilience


def main(options):
    words = workload.Words()
    model = workload.build_model()
    optimizer = torch.optim.Adam(model.parameters())

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parallel = DistributedDataParallel(model)
    for step in range(workload.load(options.checkpoints, model, optimizer), options.steps):
        resilience.step(step)
        if step % 10 == 0 and rank == 0:
            workload.save(options.checkpoints, step, model, optimizer)
        workload.maybe_fail(options, step, rank)
        inputs, target = words.batch(step, rank)
        loss = torch.nn.functional.cross_entropy(parallel(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        resilience.heartbeat()
        if rank == 0:
            workload.say(f"step {step} of {world_size} ranks: loss {loss.item():.3f}")
    del parallel  # before its group: torch may deadlock if DDP holds the last reference to the group
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    main(workload.options())
