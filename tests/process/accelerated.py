"""What the ranks of the tests of accelerator groups run: groups of `tests.support.asynchronous`, which behaves like
NCCL, in a wrapped function."""

from __future__ import annotations

import functools
import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess.health_check import FaultCounter
from resilience.inprocess.initialize import RetryController
from tests.support import asynchronous
from tests.support.asynchronous import BACKEND, diary, options

LIMIT = 60.0  # seconds


def rank() -> int:
    return int(os.environ["RANK"])


def wrapper(timeouts: dict[str, float], **hooks: Any) -> Wrapper:
    asynchronous.register()
    return Wrapper(**{name: timedelta(seconds=value) for name, value in timeouts.items()}, **hooks)


def reduce_ones(group: Any = None) -> float:
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return float(total)


def abort_several_groups(
    abort: dict[str, Any],
    timeouts: dict[str, float] = {},  # noqa: B006  only read
    only: int | None = None,
    hang: bool = False,
) -> dict[str, Any]:
    """Rank 1 fails in the first iteration while the others wait in the last of three groups; or it hangs.

    abort: options of the groups, of one rank `only` if given. Returns the iteration that completed, and what happened
    to the groups."""
    initial_rank = rank()
    if only is None or only == initial_rank:
        for name, value in abort.items():
            setattr(options, name, value)

    @wrapper(timeouts)
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group(BACKEND)
        groups = [None, dist.new_group(), dist.new_group()]
        assert [reduce_ones(group) for group in groups] == [dist.get_world_size()] * 3
        if call.iteration == 0:
            if initial_rank == 1 and not hang:
                raise ValueError("broken, by schedule")
            if initial_rank == 1:
                time.sleep(LIMIT)
            reduce_ones(groups[-1])
        dist.destroy_process_group()
        return call.iteration

    return {"iteration": function(), "diary": list(diary)}


def build_beside_an_abort_that_hangs(
    refusals: int | None,
    most: int | None = None,
    faults: int | None = None,
    timeouts: dict[str, float] = {},  # noqa: B006  only read
) -> dict[str, Any]:
    """Rank 1 fails in the first iteration, while rank 0 waits in a group. The abort of that group frees the rank, and
    then runs for so many `refusals` of a new group, or for ever.

    most: starts of the function, for RetryController. faults: for FaultCounter. Returns the iteration that completed,
    and what happened to the groups."""
    initial_rank = rank()
    options.frees_first = True
    if initial_rank == 0:
        options.before_end = functools.partial(_hold, refusals)

    @wrapper(timeouts, initialize=RetryController(max_iterations=most), health_check=FaultCounter(faults))
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group(BACKEND)
        assert reduce_ones() == dist.get_world_size()
        if call.iteration == 0:
            if initial_rank == 1:
                raise ValueError("broken, by schedule")
            reduce_ones()
        dist.destroy_process_group()
        return call.iteration

    return {"iteration": function(), "diary": list(diary)}


def _hold(refusals: int | None, number: int) -> None:
    """Keep an abort from returning, until so many groups were refused."""
    while refusals is None or [what for what, _ in diary].count("refused") < refusals:
        time.sleep(0.01)


def build_a_group_during_the_abort() -> dict[str, Any]:
    """Rank 0 is freed from a collective by the abort, builds another group before that abort ends, and waits in it
    for a rank that never comes. Only an abort of that one frees it."""
    initial_rank = rank()
    options.frees_first, options.refuses = True, False
    waits = threading.Event()

    def hold_until_it_waits(number: int) -> None:
        if initial_rank == 0 and number == 1:
            assert waits.wait(LIMIT)
            assert asynchronous.groups[2].is_waiting.wait(LIMIT)

    options.before_end = hold_until_it_waits

    @wrapper({})
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group(BACKEND)
        second = dist.new_group()
        assert reduce_ones(second) == dist.get_world_size()
        if call.iteration == 0:
            store = dist.distributed_c10d._get_default_store()
            if initial_rank == 1:
                store.wait(["rank 0 has left the collective before"])
                raise ValueError("broken, by schedule")
            try:
                store.set("rank 0 has left the collective before", "")
                reduce_ones()
            except RuntimeError:
                dist.destroy_process_group()
                dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=2)
                waits.set()
                reduce_ones()
        dist.destroy_process_group()
        return call.iteration

    return {"iteration": function(), "diary": list(diary)}


def train_ddp(restarts: int, steps: int) -> dict[str, Any]:
    """Train under DDP; the ranks take turns to fail, in the middle of each iteration but the last."""
    initial_rank = rank()
    options.abort_s = 0.05

    @wrapper({})
    def function(call: CallWrapper | None = None) -> tuple[int, list[float]]:
        assert call is not None
        dist.init_process_group(BACKEND)
        torch.manual_seed(1)
        model = DistributedDataParallel(torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            if (
                call.iteration < restarts
                and step == steps // 2
                and call.iteration % dist.get_world_size() == initial_rank
            ):
                raise ValueError("broken, by schedule")
            optimizer.zero_grad()
            model(torch.full((2, 8), float(dist.get_rank() + 1))).square().mean().backward()
            optimizer.step()
        weights = model.module.weight.detach().flatten().tolist()
        dist.destroy_process_group()
        return call.iteration, weights

    iteration, weights = function()
    return {"iteration": iteration, "weights": weights, "diary": list(diary)}


def tell_environment() -> list[str | None]:
    """Return TORCH_NCCL_RETHROW_CUDA_ERRORS inside the function, and after the call."""
    name = "TORCH_NCCL_RETHROW_CUDA_ERRORS"

    @wrapper({})
    def function() -> str | None:
        return os.environ.get(name)

    return [function(), os.environ.get(name)]


def count_faults(faults: int, frees_first: bool) -> dict[str, Any]:
    """Rank 1 fails in each of the first iterations, while every other rank meets the abort in another way.

    Returns how many faults the rank's FaultCounter has counted, and the iteration that completed."""
    initial_rank = rank()
    options.abort_s, options.frees_first = 0.2, frees_first
    counter = FaultCounter()

    @wrapper({}, health_check=counter)
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group(BACKEND)
        reduce_ones()
        if call.iteration < faults:
            if initial_rank == 1:
                raise ValueError("broken, by schedule")
            if initial_rank == 2:  # in a frame of its own
                dist.all_reduce(torch.ones(1), async_op=True).wait()
            while initial_rank == 3 and not asynchronous.groups[-1].has_failed:  # uses a group that was aborted
                time.sleep(0.001)
            try:
                reduce_ones()
            except RuntimeError as error:
                raise KeyError("made of it by user code") from error
        dist.destroy_process_group()
        return call.iteration

    return {"iteration": function(), "faults": counter.faults_count}
