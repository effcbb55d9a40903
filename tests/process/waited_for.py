"""What the ranks of test_waited_for run: a DDP model, one rank of which does not come to the next collective."""

from __future__ import annotations

import os
import threading
import time

import torch
import torch.distributed as dist

import resilience
from resilience.core import watch
from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess._runtime import watcher
from resilience.system import stacks
from tests.support import signs

STEPS, AT = 6, 4
_kept: list[torch.nn.Module] = []
"""torch 2.13 deadlocks if DDP's reducer is freed, under the GIL, while gloo's thread lets go of the last collective."""


def be_patient() -> None:
    """Wait for the position of each rank, which a busy machine is slow to give. The monitors are forked."""
    watcher.EVIDENCE = watch.EVIDENCE = stacks.ASK_LIMIT = stacks.DUMP_LIMIT = 60.0


def hang(how: str) -> None:
    """Do not come back."""
    match how:
        case "py_loop":
            spin()
        case "sleep":
            time.sleep(600)
        case "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "barrier":
            dist.barrier()  # which no other rank enters


def spin() -> None:
    while True:
        pass


def train(how: str, culprit: int, with_ddp: bool = True, is_held: bool = False) -> int:
    """In the first iteration, one rank does not do step AT. is_held: ranks hold before their first step."""
    be_patient()
    initial_rank = int(os.environ["RANK"])

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group("gloo")
        model: torch.nn.Module = torch.nn.Linear(4, 2)
        if with_ddp:
            model = torch.nn.parallel.DistributedDataParallel(model)
            _kept.append(model)
        if is_held and call.iteration == 0:
            signs.hold("before training", initial_rank)
        if call.iteration == 1:
            signs.show("restarted", initial_rank)
        for step in range(STEPS):
            if call.iteration == 0 and step == AT and initial_rank == culprit:
                signs.show("does not come", initial_rank)
                hang(how)
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            if not with_ddp:
                dist.all_reduce(loss.detach())
            resilience.step(step)
        dist.destroy_process_group()
        return call.iteration

    return function()


def pipeline(how: str, culprit: int) -> int:
    """Each rank passes a tensor on to the next one, then all meet. In iteration 0, one rank does not do step AT."""
    be_patient()
    initial_rank = int(os.environ["RANK"])

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        tensor = torch.ones(4)
        for step in range(STEPS):
            if call.iteration == 0 and step == AT and initial_rank == culprit:
                hang(how)
            if rank > 0:
                dist.recv(tensor, rank - 1)
            if rank < size - 1:
                dist.send(tensor, rank + 1)
            dist.all_reduce(tensor)
            resilience.step(step)
        dist.destroy_process_group()
        return call.iteration

    return function()
