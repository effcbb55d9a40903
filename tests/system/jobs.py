"""What the ranks of the system tests run."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

import resilience
from resilience.inprocess import CallWrapper, Wrapper
from tests.support import hosts
from tests.support.signs import hold

STEPS = 12
RESULT = float(STEPS)


def train_and_hold(at: str, step_held: int, node_lost_after: float = 30.0) -> float | None:
    """Add the mean of ones at each step; all ranks hold at a step of the first iteration. HOST: the host to be on.
    node_lost_after: seconds of silence; a node that merely gets no turn for so long is excluded as well."""
    if (host := os.environ.get("HOST")) is not None:
        hosts.enter(host)
    initial_rank = int(os.environ["RANK"])

    @Wrapper(heartbeat_timeout=timedelta(seconds=node_lost_after))
    def loop(call: CallWrapper | None = None) -> float:
        assert call is not None
        dist.init_process_group("gloo")
        total = torch.zeros(1)
        for step in range(STEPS):
            resilience.step(step)
            if (call.iteration, step) == (0, step_held):
                hold(at, initial_rank)
            ones = torch.ones(1)
            dist.all_reduce(ones)
            total += ones / dist.get_world_size()
        dist.destroy_process_group()
        return float(total)

    return loop()
