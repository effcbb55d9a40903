"""Second step: objects that do not depend on the process group are built once, outside of the wrapped function.

    python examples/launch.py --nproc 4 examples/02_build_outside.py --checkpoints /tmp/ramp2 --fault exception@25:1

Data, model and optimiser survive the restart as objects, so a restart no longer builds them. Their contents may
be half updated when the function is interrupted, so the function loads a checkpoint at its start. It writes the
first one before the first step."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import workload
from torch.nn.parallel import DistributedDataParallel

import resilience
from resilience.inprocess import Wrapper
from resilience.inprocess.initialize import RetryController


@Wrapper(
    initialize=RetryController(max_iterations=10),  # give up when it keeps failing
    soft_timeout=timedelta(seconds=20),  # no call into C may take longer (default 60 s): all start again
    hard_timeout=timedelta(seconds=40),  # still in that call: its process is killed, the others go on
)
def train(options, words, model, optimizer):
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
        if rank == 0:
            workload.say(f"step {step} of {world_size} ranks: loss {loss.item():.3f}")
    del parallel  # before its group: torch may deadlock if DDP holds the last reference to the group
    dist.destroy_process_group()


def main(options):
    words = workload.Words()
    model = workload.build_model()
    optimizer = torch.optim.Adam(model.parameters())
    train(options, words, model, optimizer)


if __name__ == "__main__":
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    main(workload.options())
