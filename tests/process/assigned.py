"""Ranks whose assignment hook raises."""

from __future__ import annotations

import os
import time
from datetime import timedelta

from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess.rank_assignment import RankAssignment, ShiftRanks
from resilience.inprocess.state import State


class FailsOn(RankAssignment):
    """Shifts ranks, but raises on some initial ranks: at the call of the function, or after iteration 0."""

    def __init__(self, ranks: list[int], at_entry: bool) -> None:
        self.ranks = ranks
        self.at_entry = at_entry

    def __call__(self, state: State, terminated: set[int]) -> tuple[State, set[int]]:
        is_entry = state.status.name == "INITIALIZED"
        if state.initial_rank in self.ranks and (is_entry == self.at_entry) and state.iteration == 0:
            raise KeyError("no such rack")
        return ShiftRanks()(state, terminated)


def fails_on(ranks: list[int], at_entry: bool) -> tuple[int, int, int]:
    """Rank 1 raises in iteration 0. Return (iteration, rank, world size) at the end."""

    @Wrapper(
        rank_assignment=FailsOn(ranks, at_entry),
        soft_timeout=timedelta(seconds=60),
        hard_timeout=timedelta(seconds=90),
        barrier_timeout=timedelta(seconds=240),
        completion_timeout=timedelta(seconds=240),
    )
    def function(call: CallWrapper | None = None) -> tuple[int, int, int]:
        assert call is not None
        if call.iteration == 0 and os.environ["RANK"] == "1":
            raise ValueError("all restart")
        while call.iteration == 0:
            time.sleep(0.005)
        return call.iteration, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    return function()
