"""What is alive when a wrapped function is entered again?  Jobs that build models whose objects refer to each other.

Nothing but a garbage collection frees such a model: a trainer that refers to its model and back, a module of FSDP2.
Each job answers, by iteration, how many models of earlier iterations were alive at the entry, and the descriptors,
threads and anonymous memory of the process then. Only the restart itself has collected garbage: a collection
here would hide what that left."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess.finalize import Finalize
from resilience.inprocess.health_check import HealthCheck
from resilience.inprocess.initialize import Initialize
from resilience.inprocess.rank_assignment import RankAssignment, ShiftRanks
from resilience.inprocess.rank_filter import RankFilter
from resilience.inprocess.state import State
from tests.support import memory, threads

ELEMENTS_PER_MIB = 1 << 18  # of float32
WIDTH = 512  # a model with its gradients and optimizer state takes 2 MiB on each of two ranks
BUILD_LIMIT = timedelta(seconds=0.5)  # longer than a rank waits for a peer of an interrupted iteration
KEPT = 10_000
SETTLED = 2.0  # seconds
FIRST_ENTRIES = 2  # until then a process does things for the first time
Entry = dict[str, int]


class Trainer:
    """Refers to its model, and the model to it."""

    def __init__(self, mib: int) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.model.weight = torch.nn.Parameter(torch.ones(mib * ELEMENTS_PER_MIB))
        self.model.trainer = self


def _entry(models: list[weakref.ref[Any]], before: list[Entry]) -> Entry:
    """Count the models that are alive at the entry, then descriptors and threads, then the anonymous memory in KiB.

    If there are more descriptors or threads than at the entry before, they are counted again for up to SETTLED seconds:
    a thread may be writing a file, and a busy host takes long to close connections."""
    entry = {"alive": sum(model() is not None for model in models)}
    deadline = time.monotonic() + SETTLED
    while True:
        entry |= {"descriptors": psutil.Process().num_fds(), "threads": threads.count()}
        last = before[-1] if len(before) > FIRST_ENTRIES else entry
        if all(entry[name] <= last[name] for name in ("descriptors", "threads")) or time.monotonic() > deadline:
            return entry | {"anonymous_kib": memory.anonymous_kib()}
        time.sleep(0.01)


def _peak_bytes() -> int:
    """Return the peak of resident memory since `_forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def restart_with_a_cyclic_model(restarts: int, mib: int) -> dict[str, Any]:
    """Rank `iteration % world size` raises in each iteration but the last."""
    models: list[weakref.ref[Any]] = []
    entries: list[Entry] = []
    steady = [0]

    @Wrapper()
    def function(call: CallWrapper | None = None) -> None:
        assert call is not None
        entries.append(_entry(models, entries))
        dist.init_process_group("gloo")
        trainer = Trainer(mib)
        trainer.groups = [dist.new_group(), dist.group.WORLD]
        models.append(weakref.ref(trainer.model))
        dist.all_reduce(trainer.model.weight.data[:1])
        if call.iteration == 0:
            steady[0] = psutil.Process().memory_info().rss
            _forget_peak()
        if call.iteration < restarts:
            if call.iteration % dist.get_world_size() == dist.get_rank():
                raise ValueError("by schedule")
            dist.all_reduce(torch.ones(1))

    gc.disable()  # what is collected by chance proves nothing
    memory.give_large_blocks_back()
    function()
    return {"entries": entries, "steady_bytes": steady[0], "peak_bytes": _peak_bytes()}


def count_frozen_objects(restarts: int) -> list[list[int]]:
    """Restart in two calls of a wrapped function. Each entry keeps KEPT lists, which a further freeze would add.

    Returns how many objects are exempt from collections at each entry, for each call."""
    kept: list[list[list[None]]] = []
    counts: list[list[int]] = []

    @Wrapper()
    def function(call: CallWrapper | None = None) -> None:
        assert call is not None
        counts[-1].append(gc.get_freeze_count())
        kept.append([[] for _ in range(KEPT)])
        dist.init_process_group("gloo")
        if call.iteration < restarts and dist.get_rank() == 1:
            raise ValueError("by schedule")
        dist.all_reduce(torch.ones(1))  # nobody destroys the group while another rank still builds it
        dist.destroy_process_group()

    for _ in range(2):
        counts.append([])
        function()
    return counts


def restart_with_fsdp2(restarts: int) -> list[Entry]:
    """As above, with a model that FSDP2 shards over a DeviceMesh, and one optimizer step in each iteration."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    models: list[weakref.ref[Any]] = []
    entries: list[Entry] = []

    @Wrapper()
    def function(call: CallWrapper | None = None) -> list[Entry]:
        assert call is not None
        entries.append(_entry(models, entries))
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 8))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        models.append(weakref.ref(model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(torch.ones(4, WIDTH)).sum().backward()
        optimizer.step()
        if call.iteration < restarts:
            if call.iteration % dist.get_world_size() == dist.get_rank():
                raise ValueError("by schedule")
            dist.all_reduce(torch.ones(1))
        return entries

    gc.disable()
    memory.give_large_blocks_back()
    return function()


def restart_beside_a_kept_group(restarts: int) -> list[Entry]:
    """User code keeps the group of the first iteration. Rank 1 raises in each iteration but the last, while rank 0
    builds a group to which nobody connects, and gives up after BUILD_LIMIT."""
    rank, kept = int(os.environ["RANK"]), list[Any]()
    entries: list[Entry] = []

    @Wrapper()
    def function(call: CallWrapper | None = None) -> list[Entry]:
        assert call is not None
        entries.append(_entry([], entries))
        if not kept:
            dist.init_process_group("gloo")
            kept.append(dist.new_group())
            dist.barrier()  # else rank 1 may raise before rank 0 has its group
        elif call.iteration < restarts and rank == 0:
            alone = dist.HashStore()
            alone.set_timeout(BUILD_LIMIT)
            dist.init_process_group("gloo", store=alone, rank=0, world_size=2, timeout=BUILD_LIMIT)
        if call.iteration < restarts:
            if rank == 1:
                raise ValueError("by schedule")
            dist.all_reduce(torch.ones(1))
        return entries

    return function()


class _Blocking:
    """Its finalizer never returns."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # a signal does not end it


def block_in_a_finalizer() -> int:
    """Rank 1 raises and leaves garbage whose finalizer blocks; answers the iteration of the survivors."""

    @Wrapper(
        soft_timeout=timedelta(seconds=8),
        hard_timeout=timedelta(seconds=10),
        progress_watchdog_interval=timedelta(seconds=0.25),
        termination_grace_time=timedelta(seconds=0.5),
    )
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if call.iteration == 0:
            dist.init_process_group("gloo")
            if dist.get_rank() == 1:
                _Blocking()
                raise ValueError("by schedule")
            dist.all_reduce(torch.ones(1))
        return call.iteration

    gc.disable()
    return function()


def _wait_or_fail(state: State) -> None:
    """Rank 1 fails in the first iteration, once all others wait for a file that nobody writes."""
    if state.iteration == 0:
        if state.rank == 1:
            while len(list(Path().glob("waits.*"))) < state.world_size - 1:
                time.sleep(0.01)
            raise ValueError("by schedule")
        Path(f"waits.{state.rank}").touch()
        while not Path("never").exists():
            time.sleep(0.01)


class WaitingInitialize(Initialize):
    def __call__(self, state: State) -> State:
        _wait_or_fail(state)
        return state


class WaitingCheck(HealthCheck):
    def __call__(self, state: State, error: Exception | None) -> tuple[State, Exception | None]:
        if not self.has_run:
            self.has_run = True
            _wait_or_fail(state)
        return state, error

    has_run = False


def wait_in_a_hook(hook: str) -> int:
    """The named hook, before the function, waits on all ranks but one, which fails there."""
    hooks: dict[str, Any] = {
        "initialize": {"initialize": WaitingInitialize()},
        "health_check": {"health_check": WaitingCheck()},
    }

    @Wrapper(**hooks[hook])
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        return call.iteration

    return function()


class _AfterFault(Finalize, HealthCheck, RankAssignment, RankFilter):
    """A hook after a fault. Rank 0 waits in it for rank 1, which is lost there, and sets no limit to that."""

    def __call__(self, state: State, *others: Any) -> Any:
        if Path("fault").exists() and state.initial_rank == 0:
            Path("waits").touch()
            while not Path("never").exists():
                time.sleep(0.01)
        if Path("fault").exists() and state.initial_rank == 1:
            while not Path("waits").exists():
                time.sleep(0.01)
            raise ValueError("lost in the hook")
        return (state, *others) if others else state


class _AssignmentAfterFault(_AfterFault):
    def __call__(self, state: State, *others: Any) -> Any:
        return ShiftRanks()(*super().__call__(state, *others))


def wait_in_a_hook_after_a_fault(hook: str) -> int:
    """Rank 1 raises, and is lost in the named hook while rank 0 waits for it there. The other ranks wait for nobody."""
    hooks: dict[str, Any] = {hook: _AssignmentAfterFault() if hook == "rank_assignment" else _AfterFault()}

    @Wrapper(
        soft_timeout=timedelta(seconds=6),
        hard_timeout=timedelta(seconds=10),
        progress_watchdog_interval=timedelta(seconds=0.25),
        termination_grace_time=timedelta(seconds=0.5),
        **hooks,
    )
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if call.iteration == 0:
            Path(f"inside.{call.state.initial_rank}").touch()
            while call.state.initial_rank != 1 or len(list(Path().glob("inside.*"))) < call.state.world_size:
                time.sleep(0.01)
            Path("fault").touch()
            raise ValueError("by schedule")
        return call.iteration

    return function()


def wait_natively_in_initialize() -> int:
    """Rank 1 fails in `initialize`, the others wait there in a collective."""

    class Gather(Initialize):
        def __call__(self, state: State) -> State:
            if state.iteration == 0:
                dist.init_process_group("gloo")
                if state.rank == 1:
                    raise ValueError("by schedule")
                dist.all_reduce(torch.ones(1))
            return state

    @Wrapper(initialize=Gather())
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        return call.iteration

    return function()
