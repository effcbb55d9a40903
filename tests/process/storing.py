"""What the ranks of the store tests do. Each is called by name in a process of its own."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from resilience.facts.interruptions import Interruption, InterruptionRecord
from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess._runtime import watcher
from resilience.inprocess.compose import Compose
from resilience.inprocess.rank_assignment import FilterGroupedByKey, ShiftRanks
from resilience.inprocess.state import State
from resilience.inprocess.store import FileStore, PrefixStore, StoreMixin, TCPStore, hosting

LIMIT = timedelta(seconds=30)


class OwnStore(dist.TCPStore, StoreMixin):
    """As a user would write it: torch's class first."""

    def __init__(self) -> None:
        super().__init__(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def store_of(kind: str) -> Any:
    if kind == "file":
        return FileStore(os.environ["STORE_FILE"])
    if kind == "own":
        return OwnStore()
    with hosting(False):
        return TCPStore()


def rank_and_size() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def share(kind: str) -> dict[str, Any]:
    """Use every method once, with barriers between writing and reading."""
    rank, size = rank_and_size()
    store = PrefixStore(0, store_of(kind))
    store.set_initial_rank(rank, size - rank)
    store.initial_barrier(rank=rank, rendezvous_count=size, timeout=LIMIT)
    initial = store.get_initial_rank((rank + 1) % size)
    store.record_interrupted(InterruptionRecord(rank, Interruption.EXCEPTION))
    if rank % 2:
        store.record_terminated_rank(rank)
        store.record_base_terminated_rank(rank)
    if rank == 3:
        store.record_completed()
    store.iteration_barrier(rank=rank, rendezvous_count=size, timeout=LIMIT, timeout_chunk=timedelta(seconds=1))
    told = {
        "initial": initial,
        "records": sorted(record.rank for record in store.get_interruption_records()),
        "order": [record.rank for record in store.get_interruption_records()],
        "terminated": store.get_terminated_ranks(),
        "left": store.get_base_terminated_count(),
        "completed": store.is_any_rank_completed(),
    }
    store.barrier(1000 * rank, "numbers with gaps", size, LIMIT)
    store.termination_barrier(rank=rank, rendezvous_count=size, timeout=LIMIT)
    return told


def regroup(kind: str, node_size: int, lost: list[int]) -> dict[str, Any]:
    """Lose ranks, and with them what is left of their nodes."""
    rank, _ = rank_and_size()
    whole = Compose(
        ShiftRanks(),
        FilterGroupedByKey(lambda rank, size: f"node {rank // node_size}", lambda n: n == node_size, LIMIT),
    )
    state = State(store=PrefixStore(0, store_of(kind)))
    if rank in lost:
        return {"rank": None}
    try:
        state, left = whole(state, set(lost))
    except Exception as error:
        return {"rank": None, "error": type(error).__name__}
    return {"rank": state.rank, "size": state.world_size, "left": left}


def overflow(kind: str, count: int) -> str:
    """More ranks come than the barrier is made for."""
    rank, _ = rank_and_size()
    try:
        store_of(kind).barrier(rank, "too small", count, LIMIT)
    except Exception as error:
        return type(error).__name__
    return "met"


def host_or_join() -> dict[str, Any]:
    """Make a store outside any Wrapper; rank 0 hosts it, and stays until all are through."""
    rank, size = rank_and_size()
    store = TCPStore(timeout=LIMIT)
    second = TCPStore(timeout=LIMIT, wait_for_workers=False)  # rank 0's port is taken by then
    store.barrier(rank, "made", size, LIMIT)
    second.add("through", 1)
    if rank in store.critical_ranks:
        store.wait(["gone"], LIMIT)
    elif second.add("leaving", 1) == size - 1:
        second.set("gone", "1")
    return {"critical": store.critical_ranks, "through": rank != 0 or int(store.get("through"))}


def restart_with_a_watcher_that_fails() -> int:
    """Rank 0 raises in the first iteration; the others wait for a file that nobody writes. The thread of rank 1 that
    watches the iteration cannot read how it was decided. Returns the iteration."""

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        while call.iteration == 0:
            if os.environ["RANK"] == "0":
                raise ValueError("by schedule")
            time.sleep(0.01)
        return call.iteration

    def fail(operation: object, store: object) -> None:
        raise SystemError("bad argument to internal function")

    if os.environ["RANK"] == "1":
        watcher.execute = fail  # type: ignore[assignment]
    return function()
