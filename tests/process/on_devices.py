"""What the ranks of the tests on real devices run: training under DDP over NCCL, in a wrapped function."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess.finalize import ThreadedFinalize
from resilience.inprocess.health_check import CudaHealthCheck

SIZE = 6144
MODEL_BYTES = 4 * SIZE**2  # 144 MiB: more than what cuBLAS keeps of a device for good
STEPS = 4


def train_over_nccl(restarts: int, device: int | None = None) -> dict[str, Any]:
    """Train under DDP; the ranks take turns to fail, in the middle of each iteration but the last.

    device: default LOCAL_RANK. Returns the iteration that completed, the sum of the weights, and of each iteration what
    its first line found in the environment and in the device's memory, and where its `finalize` ran."""
    assert not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork(), "CUDA was initialised before the fork"
    initial_rank = int(os.environ["RANK"])
    device = int(os.environ["LOCAL_RANK"]) if device is None else device
    rethrow: list[str | None] = []
    allocated: list[int] = []
    finalized_on: list[int] = []
    finalize = ThreadedFinalize(timedelta(seconds=60), lambda: finalized_on.append(torch.cuda.current_device()))

    @Wrapper(finalize=finalize, health_check=CudaHealthCheck())
    def function(call: CallWrapper | None = None) -> tuple[int, float]:
        assert call is not None
        torch.cuda.set_device(device)
        rethrow.append(os.environ.get("TORCH_NCCL_RETHROW_CUDA_ERRORS"))
        allocated.append(torch.cuda.memory_allocated())
        dist.init_process_group("nccl")
        torch.manual_seed(1)
        linear = torch.nn.Linear(SIZE, SIZE, bias=False, device="cuda")
        model = DistributedDataParallel(linear, device_ids=[device])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            if (
                call.iteration < restarts
                and step == STEPS // 2
                and call.iteration % dist.get_world_size() == initial_rank
            ):
                raise ValueError("broken, by schedule")
            optimizer.zero_grad()
            loss = model(torch.full((2, SIZE), float(dist.get_rank() + 1), device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            loss.item()  # waits for the device, and so for the other ranks
        weights = float(linear.weight.double().sum())
        dist.destroy_process_group()
        return call.iteration, weights

    iteration, weights = function()
    return {
        "iteration": iteration,
        "weights": weights,
        "rethrow": rethrow,
        "allocated": allocated,
        "finalized_on": finalized_on,
    }
