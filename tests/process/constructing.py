"""What the ranks of the tests of store constructors run: one fails while another waits in a constructor."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from resilience.inprocess import CallWrapper, Wrapper
from tests.support.signs import hold, show


def connect_to_the_iterations_store() -> int:
    """Initial rank 0 leaves. In iteration 1 the store is hosted by the monitor of initial rank 1, which raises while
    initial rank 2 connects to that store."""
    initial = int(os.environ["RANK"])

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if call.iteration == 0:
            if initial == 0:
                raise SystemExit(3)
            hold("never", initial)
        if call.iteration == 1:
            hold("entered", initial)
            if initial == 1:
                hold("raises", initial)
                raise ValueError("by schedule")
            show("connects", initial)
            dist.init_process_group("gloo")
        return call.iteration

    return function()


def connect_to_a_store_of_its_own(port: int) -> int:
    """Rank 1 connects to a store at `port`, which is not there; rank 0 raises."""
    rank = int(os.environ["RANK"])

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if call.iteration == 0:
            if rank == 0:
                hold("raises", rank)
                raise ValueError("by schedule")
            show("connects", rank)
            dist.TCPStore("127.0.0.1", port, 2, is_master=False)
        return call.iteration

    return function()


def host_a_store_of_its_own(port: int) -> int:
    """Rank 0 hosts a store at `port` and waits in its constructor for rank 1, which raises. Both meet there later."""
    rank = int(os.environ["RANK"])

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if rank == 1 and call.iteration == 0:
            hold("raises", rank)
            raise ValueError("by schedule")
        show("connects", rank)
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        dist.barrier()  # a rank that has built its group may still be what another one connects to
        dist.destroy_process_group()
        return call.iteration

    return function()


def build_a_group_over_a_store_of_its_own(port: int) -> int:
    """Rank 0 builds a group over a store that both ranks have made in the function; rank 1 raises instead."""
    rank = int(os.environ["RANK"])

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
        if rank == 1 and call.iteration == 0:
            hold("raises", rank)
            raise ValueError("by schedule")
        show("builds", rank)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        dist.barrier()  # as above
        dist.destroy_process_group()
        return call.iteration

    return function()


def construct_with_a_timeout(port: int) -> dict[str, Any]:
    """Connect to the iteration's store, and to one that is not there, each with a timeout."""

    @Wrapper()
    def function() -> dict[str, Any]:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        by_name = dist.TCPStore(host_name=place[0], port=place[1], timeout=timedelta(seconds=40))
        by_place = dist.TCPStore(*place, None, False, timedelta(seconds=50))
        began = time.monotonic()
        try:
            dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=1.5))
        except dist.DistNetworkError as error:
            return {
                "timeouts": (by_name.timeout.total_seconds(), by_place.timeout.total_seconds()),
                "answers": by_name.add("key", 1) + by_place.add("key", 1),
                "error": str(error),
                "has_waited": time.monotonic() - began >= 1.5,
            }
        return {}

    return function()
