"""Where does this rank stand?  The value that every hook receives and may change.

Hooks and the wrapper share one State a rank. The protocol keeps its own, immutable `Seat`; this is the
compatible view of it, and what the function sees in its environment is set from here."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from resilience.adapters.environment import rank_and_world_size
from resilience.core.restart import ENTRY, Seat


class Status(Enum):
    """What a rank does in the present iteration."""

    INITIALIZED = auto()  # no rank assignment yet
    ACTIVE = auto()
    INACTIVE = auto()
    ABORTING = auto()
    ABORTED = auto()


_SAME = -1  # filled in on construction
ABORT_WAIT = 30.0  # seconds that an abort may take that no Wrapper has begun


@dataclass
class State:
    """A rank's place in the world. `State()` is that at a call: RANK (default 0) and WORLD_SIZE (1).

    rank, world_size: now, among all ranks that take part. active_world_size: how many of them run the
    function; they have the ranks 0 to active_world_size-1. initial_rank, initial_world_size: at the
    call. iteration: how often the function was started before. store: of the present iteration, a
    StoreMixin. Raises: ConfigurationError if the environment holds no valid rank."""

    rank: int = field(default_factory=lambda: rank_and_world_size()[0])
    world_size: int = field(default_factory=lambda: rank_and_world_size()[1])
    initial_rank: int = _SAME
    initial_world_size: int = _SAME
    active_world_size: int = _SAME
    iteration: int = 0
    status: Status = Status.INITIALIZED
    store: Any = field(default=None, repr=False, compare=False)
    _abort_ends_at: float | None = field(default=None, init=False, repr=False, compare=False)  # monotonic seconds

    def __post_init__(self) -> None:
        if self.initial_rank == _SAME:
            self.initial_rank = self.rank
        if self.initial_world_size == _SAME:
            self.initial_world_size = self.world_size
        if self.active_world_size == _SAME:
            self.active_world_size = self.world_size

    @classmethod
    def from_environment(cls) -> State:
        """Return the state at a call. Raises: ConfigurationError."""
        return cls()

    @classmethod
    def from_seat(cls, seat: Seat, store: Any = None, initial_world_size: int | None = None) -> State:
        """Return the state of a rank that somebody stands in for, as that rank itself had it."""
        status = Status.ACTIVE if seat.is_active else Status.INACTIVE
        return cls(
            rank=seat.rank,
            world_size=seat.world_size,
            initial_rank=seat.initial_rank,
            initial_world_size=seat.world_size if initial_world_size is None else initial_world_size,
            active_world_size=seat.active_world_size,
            iteration=max(0, seat.iteration),
            status=Status.INITIALIZED if seat.iteration == ENTRY else status,
            store=store,
        )

    def set_distributed_vars(self) -> None:
        """Set RANK and WORLD_SIZE as the function shall see them: WORLD_SIZE is the active world."""
        os.environ["RANK"] = str(self.rank)
        os.environ["WORLD_SIZE"] = str(self.active_world_size)

    def abort_begins(self, limit: float) -> None:
        """The Wrapper is about to call the abort hook, which may wait `limit` seconds in all."""
        self._abort_ends_at = time.monotonic() + limit

    def abort_time_left(self) -> float:
        """Return how many seconds the abort hook that is being called may still wait; from 0 on."""
        return ABORT_WAIT if self._abort_ends_at is None else max(0.0, self._abort_ends_at - time.monotonic())

    def activate_all_ranks(self) -> None:
        """Let every rank run the function, until a rank filter says otherwise."""
        self.active_world_size = self.world_size
        self.status = Status.ACTIVE

    def advance(self) -> None:
        """Pass to the next iteration."""
        self.iteration += 1
