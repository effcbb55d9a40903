"""How much does a process grow each time everything is built again, without this package?

torch, gloo and the memory allocator keep something of every round of groups, models and checkpoints that is built and
destroyed. A soak holds the growth of its ranks against that: here the ranks of tests.soak.job train as there, over and
over again, with `destroy_process_group` and a collection of garbage in between, and no Wrapper."""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.soak.job import Training
from tests.soak.striking import Striker

LEAVE_LIMIT = 60.0  # seconds for the other ranks to be through
PASSES = 4


def rebuild(times: int, workers: int) -> dict[str, Any]:
    """Train for a few steps, `times` times over. Returns what each time's look showed, as tests.soak.job does."""
    torch.manual_seed(0)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, world, rank == 0, timedelta(minutes=1))
    striker = Striker((), rank, Path.cwd())
    looks: list[dict[str, Any]] = []
    total = 0.0
    for number in range(times):
        ours = dist.PrefixStore(str(number), store)
        dist.init_process_group("gloo", store=ours, rank=rank, world_size=world, timeout=timedelta(minutes=5))
        training = Training(Path.cwd(), number, rank, workers)
        looks.append(training.look(number))
        total = training.run(striker)
        del training
        for _ in range(PASSES):
            gc.collect()
    _leave(store, world, is_host=rank == 0)
    return {"sum": total, "looks": looks}


def _leave(store: dist.Store, world: int, is_host: bool) -> None:
    """Let the host of the store end last."""
    store.add("left", 1)
    deadline = time.monotonic() + LEAVE_LIMIT
    while is_host and store.add("left", 0) < world and time.monotonic() < deadline:
        time.sleep(0.01)
