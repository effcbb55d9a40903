"""A data-parallel training script without this package: any fault ends the job.

python examples/launch.py --nproc 4 examples/00_plain.py --fault exception@25:1"""

import os
import traceback

import torch
import torch.distributed as dist
import workload
from torch.nn.parallel import DistributedDataParallel


def main(options):
    words = workload.Words()
    model = workload.build_model()
    optimizer = torch.optim.Adam(model.parameters())

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parallel = DistributedDataParallel(model)
    for step in range(workload.load(options.checkpoints, model, optimizer), options.steps):
        if step % 10 == 0 and rank == 0:
            workload.save(options.checkpoints, step, model, optimizer)
        workload.maybe_fail(options, step, rank)
        inputs, target = words.batch(step, rank)
        loss = torch.nn.functional.cross_entropy(parallel(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            workload.say(f"step {step} of {world_size} ranks: loss {loss.item():.3f}")
    del parallel  # before its group: torch may deadlock if DDP holds the last reference to the group
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    try:
        main(workload.options())
    except Exception:
        traceback.print_exc()
        os._exit(1)  # at once: torch may deadlock where DDP is freed while gloo's thread lets go of its last collective
