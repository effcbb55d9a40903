"""A worker that fails once in a job, told by a file, and says what the others have told it afterwards."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

has_failed = Path(sys.argv[1])
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
if dist.get_rank() == 1 and not has_failed.exists():
    has_failed.touch()
    sys.exit(3)
dist.barrier()  # no way out of here in the cycle in which the other one fails
print(f"result {float(ones)} of {dist.get_world_size()}")  # one piece, so that it stays whole among others
dist.destroy_process_group()
