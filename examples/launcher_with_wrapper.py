"""Both kinds of restart: in place while the node is whole, otherwise by the launcher.

    resilience run --nproc-per-node 2 --ft-restart-policy min-healthy \\
        examples/launcher_with_wrapper.py --fault exception@25:1

An exception starts the function again in the same processes. A worker that dies (--fault kill@25:1) cannot be
replaced in place: the other ranks of its node leave, the node is no longer healthy, and the launcher, whose
minimum is one healthy node, starts them all again. So the smallest unit is the same for both: a node. The
Wrapper's own monitors watch for hangs; the launcher's monitors only notice the end of a worker's process."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import workload
from torch.nn.parallel import DistributedDataParallel

import resilience
from resilience.inprocess import Compose, Wrapper
from resilience.inprocess.initialize import RetryController
from resilience.inprocess.rank_assignment import FilterGroupedByKey, ShiftRanks

NODE, NODE_SIZE = os.environ["GROUP_RANK"], int(os.environ["LOCAL_WORLD_SIZE"])


@Wrapper(
    initialize=RetryController(max_iterations=10),  # give up when it keeps failing
    # The last one runs first: the remaining ranks of a node that lost one leave, then the other ranks move up.
    rank_assignment=Compose(ShiftRanks(), FilterGroupedByKey(NODE, lambda count: count == NODE_SIZE)),
    soft_timeout=timedelta(seconds=20),  # a rank silent for so long is hung: all start again
    hard_timeout=timedelta(seconds=40),  # still silent: its process is killed
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
