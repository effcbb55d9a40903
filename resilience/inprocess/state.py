"""Where this rank stands: the value that every hook receives and may change."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from resilience.core.restart import Seat


class Status(Enum):
    """What a rank does in the present iteration."""

    INITIALIZED = auto()
    ACTIVE = auto()
    INACTIVE = auto()
    ABORTING = auto()
    ABORTED = auto()


@dataclass
class State:
    """A rank's place in the world.

    rank, world_size: now, among all ranks that take part. active_world_size: how many of them run the
    function; they have the ranks 0 to active_world_size-1. initial_rank, initial_world_size: at the
    call. iteration: how often the function was started before. store: of the present iteration."""

    rank: int
    world_size: int
    initial_rank: int
    initial_world_size: int
    active_world_size: int
    iteration: int = 0
    status: Status = Status.INITIALIZED
    store: Any = field(default=None, repr=False)

    @classmethod
    def from_environment(cls) -> State:
        """Return the state at a call: RANK (default 0) and WORLD_SIZE (default 1)."""
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        return cls(rank, size, rank, size, size)

    @classmethod
    def from_seat(cls, seat: Seat, store: Any = None) -> State:
        """Return the state of a rank that somebody stands in for."""
        return cls(
            rank=seat.rank,
            world_size=seat.world_size,
            initial_rank=seat.initial_rank,
            initial_world_size=seat.world_size,
            active_world_size=seat.active_world_size,
            iteration=max(0, seat.iteration),
            store=store,
        )

    def set_distributed_vars(self) -> None:
        """Set RANK and WORLD_SIZE as the function shall see them: WORLD_SIZE is the active world."""
        os.environ["RANK"] = str(self.rank)
        os.environ["WORLD_SIZE"] = str(self.active_world_size)

    def activate_all_ranks(self) -> None:
        """Let every rank run the function, until a rank filter says otherwise."""
        self.active_world_size = self.world_size
        self.status = Status.ACTIVE

    def advance(self) -> None:
        """Pass to the next iteration."""
        self.iteration += 1
