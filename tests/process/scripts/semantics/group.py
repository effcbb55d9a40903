"""A collective of all workers."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.tensor([float(os.environ["RANK"]) + 1])
dist.all_reduce(value)
print(dist.get_rank(), dist.get_world_size(), value.item())
dist.destroy_process_group()
