"""Ranks in their hooks for places, at entry or after a fault: rank 0 waits there, or rank 1 cannot name its group."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from resilience.inprocess import CallWrapper, Compose, Wrapper
from resilience.inprocess.rank_assignment import FilterGroupedByKey, RankAssignment, ShiftRanks
from resilience.inprocess.rank_filter import RankFilter
from resilience.inprocess.state import State
from tests.support import signs

WAITS = "waits"  # the sign of rank 0, in the hook
FAULT = Path("fault")


class Waiting:
    """Rank 0 waits for a file or a key that nobody writes. Rank 1 raises meanwhile, if `is_lost`."""

    def __init__(self, at_entry: bool, is_lost: bool, for_a_key: bool) -> None:
        self.at_entry = at_entry
        self.is_lost = is_lost
        self.for_a_key = for_a_key

    def wait(self, state: State) -> None:
        if FAULT.exists() == self.at_entry:
            return
        if state.initial_rank == 0:
            signs.show(WAITS, 0)
            if self.for_a_key:
                state.store.wait(["never"], timedelta(days=1))
            while not Path("never").exists():
                time.sleep(0.01)
        if state.initial_rank == 1 and self.is_lost:
            signs.await_sign(Path(), WAITS, 0)
            raise ValueError("lost in the hook")


class WaitingAssignment(Waiting, RankAssignment):
    def __call__(self, state: State, terminated: set[int]) -> tuple[State, set[int]]:
        self.wait(state)
        return ShiftRanks()(state, terminated)


class WaitingFilter(Waiting, RankFilter):
    def __call__(self, state: State) -> State:
        self.wait(state)
        return state


KINDS: dict[str, Any] = {"rank_assignment": WaitingAssignment, "rank_filter": WaitingFilter}


def wait_for_a_place(
    hook: str, at_entry: bool = True, is_lost: bool = False, for_a_key: bool = False
) -> tuple[int, int, int]:
    """Return (iteration, rank, world size) at the end. Rank 1 raises in iteration 0, unless rank 0 waits at entry."""

    @Wrapper(
        soft_timeout=timedelta(seconds=15),
        hard_timeout=timedelta(seconds=20),
        barrier_timeout=timedelta(seconds=32),
        progress_watchdog_interval=timedelta(seconds=0.25),
        termination_grace_time=timedelta(seconds=0.5),
        **{hook: KINDS[hook](at_entry, is_lost, for_a_key)},
    )
    def function(call: CallWrapper | None = None) -> tuple[int, int, int]:
        assert call is not None
        if call.iteration == 0 and not at_entry:
            signs.show("inside", call.state.rank)
            for rank in range(3):
                signs.await_sign(Path(), "inside", rank)
            if call.state.rank == 1:
                FAULT.touch()
                raise ValueError("by schedule")
            signs.hold("restart", call.state.rank)
        return call.iteration, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    return function()


class Rack:
    """Names the group of a rank. It cannot be found out for rank 1: its process is killed there, or it raises."""

    def __init__(self, is_killed: bool) -> None:
        self.is_killed = is_killed
        self.rank_pid = os.getpid()

    def __call__(self, rank: int, world_size: int) -> str:
        if int(os.environ["LOCAL_RANK"]) == 1:
            if self.is_killed and os.getpid() == self.rank_pid:  # not its monitor, which raises
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no such rack")
        return "rack"


def group_by_rack(is_killed: bool) -> tuple[int, int, int]:
    """Return (iteration, rank, world size) at the end."""
    assignment = Compose(ShiftRanks(), FilterGroupedByKey(Rack(is_killed), lambda count: count > 0))

    @Wrapper(rank_assignment=assignment)
    def function(call: CallWrapper | None = None) -> tuple[int, int, int]:
        assert call is not None
        return call.iteration, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    return function()
