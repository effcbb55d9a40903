"""Variables that are set before torch is imported, by names that nobody finds in the source."""

import os

for name, value in (("OMP_NUM_%s", "2"), ("OPENBLAS_NUM_%s", "1")):
    os.environ[name % "THREADS"] = value
os.environ["TORCH_DISTRIBUTED_" + "DEBUG"] = "DETAIL"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

print(torch.get_num_threads(), dist.get_debug_level())
