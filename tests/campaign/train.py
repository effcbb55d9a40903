"""The job of the campaign: a DDP model that is trained for some steps, with a checkpoint after each.

    python -m tests.campaign.train FOLDER STEPS wrapper|launcher|both|plain

`plain` has nothing of the package in it: it runs under any launcher."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.campaign import injector

SOFT, HARD = 6.0, 12.0
GROUP_TIMEOUT = "CAMPAIGN_GROUP_TIMEOUT"  # seconds, for a contestant that has no other limit
_kept: list[torch.nn.Module] = []
"""torch 2.13 deadlocks if DDP's reducer is freed, under the GIL, while gloo's thread lets go of the last collective."""


def train(folder: Path, steps: int, note: Callable[[int], object]) -> None:
    """Train from the last checkpoint to the end, and leave what the parameters are then."""
    rank, initial_rank = int(os.environ["RANK"]), int(os.environ.get("INITIAL_RANK", os.environ["RANK"]))
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get(GROUP_TIMEOUT, "300"))))
    layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(layers.double())
    _kept.append(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin = load(folder, model)
    for step in range(begin, steps):
        note(step)
        injector.strike(folder, initial_rank, step)
        torch.manual_seed(step)  # the same batch on every rank: the result does not depend on how many there are
        loss = model(torch.randn(8, 16, dtype=torch.float64)).square().mean()
        loss.backward()
        for parameter in model.parameters():  # the mean over any number of ranks is the same then, bit for bit
            assert parameter.grad is not None
            parameter.grad.copy_(parameter.grad.float())
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        if rank == 0:
            save(folder, model, step + 1)
        dist.barrier()
    if rank == 0:
        (folder / "result").write_text(digest(model))
    dist.barrier()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def save(folder: Path, model: torch.nn.Module, step: int) -> None:
    path = folder / "checkpoint.new"
    torch.save({"step": step, "model": model.state_dict()}, path)
    path.rename(folder / "checkpoint")


def load(folder: Path, model: torch.nn.Module) -> int:
    path = folder / "checkpoint"
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    return int(state["step"])


def digest(model: torch.nn.Module) -> str:
    """Return a hash of all parameters, bit for bit."""
    parts = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def main() -> None:
    folder, steps, mode = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.environ["INITIAL_RANK"] = os.environ["RANK"]
    if mode == "plain":
        train(folder, steps, lambda step: None)
        return
    import resilience

    def note(step: int) -> None:
        resilience.step(step)
        resilience.heartbeat()

    if mode == "launcher":
        train(folder, steps, note)
        return
    from resilience.inprocess import CallWrapper, Wrapper

    @Wrapper(soft_timeout=timedelta(seconds=SOFT), hard_timeout=timedelta(seconds=HARD))
    def wrapped(call: CallWrapper | None = None) -> None:
        train(folder, steps, note)

    wrapped()


if __name__ == "__main__":
    main()
