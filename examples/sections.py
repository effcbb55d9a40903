"""Sections under the launcher, with the client of the compatible API: each section has its own limit.

    resilience run --nproc-per-node 2 --ft-rank-section-timeouts setup:60,step:10,checkpoint:60 \\
        examples/sections.py --fault hang@25:1

A limit can be short for a section that is never long, and long for others. Half-way the limits are calculated
from the durations on all ranks, times `--ft-safety-factor`; they are kept beside the checkpoint, and hold from the
next start on. `resilience report RUN` names the section that hung."""

import json
import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
import workload
from torch.nn.parallel import DistributedDataParallel

import resilience
from resilience.fault_tolerance import RankMonitorClient

client = RankMonitorClient()


@contextmanager
def section(name):
    client.start_section(name)
    yield
    client.end_section(name)  # not after an exception: the section did not reach its full length


def main(options):
    limits = options.checkpoints / "limits.json"
    if limits.exists():
        client.load_state_dict(json.loads(limits.read_text()))
    client.init_workload_monitoring()

    with section("setup"):
        words = workload.Words()
        model = workload.build_model()
        optimizer = torch.optim.Adam(model.parameters())
        dist.init_process_group("gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
        parallel = DistributedDataParallel(model)
        first = workload.load(options.checkpoints, model, optimizer)

    for step in range(first, options.steps):
        resilience.step(step)
        if step % 10 == 0 and rank == 0:
            with section("checkpoint"):
                workload.save(options.checkpoints, step, model, optimizer)
        with section("step"):
            workload.maybe_fail(options, step, rank)
            inputs, target = words.batch(step, rank)
            loss = torch.nn.functional.cross_entropy(parallel(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step == options.steps // 2:
            client.calculate_and_set_section_timeouts(["step", "checkpoint"], calc_out_of_section=False)
            if rank == 0:
                limits.write_text(json.dumps(client.state_dict()))
        if rank == 0:
            workload.say(f"step {step} of {world_size} ranks: loss {loss.item():.3f}")

    client.shutdown_workload_monitoring()
    del parallel  # before its group: torch may deadlock if DDP holds the last reference to the group
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    main(workload.options())
