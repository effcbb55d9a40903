"""A worker that fails in its job's first cycle, and says what the others have told it in the second."""

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if dist.get_rank() == 1:
        sys.exit(3)
    dist.barrier()  # ends by the agent's signal
print("result", float(ones), "of", dist.get_world_size())
dist.destroy_process_group()
