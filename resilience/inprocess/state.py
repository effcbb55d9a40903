"""What is this rank's place in the world?  The value that every hook receives and may change.

Hooks and the wrapper share one State per rank. The protocol keeps its own, immutable `Seat`; State is the
compatible view of it. The function's environment variables are set from here."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from resilience.core.restart import ENTRY
from resilience.facts.seats import Seat
from resilience.inprocess.later_releases import missing, missing_in_state
from resilience.system.environment import rank_and_world_size


class Status(Enum):
    """What a rank does in the present iteration."""

    INITIALIZED = auto()  # no rank assignment yet
    ACTIVE = auto()
    INACTIVE = auto()
    ABORTING = auto()  # from the abort hook to the next rank assignment
    ABORTED = auto()  # the same, if it took longer than soft_timeout to leave the function


_UNSET = -1  # filled in on construction
ABORT_WAIT = 30.0  # seconds for an abort hook that was called without a Wrapper


@dataclass
class State:
    """A rank's place in the world. `State()` reads it at a call: RANK (default 0) and WORLD_SIZE (default 1).

    rank, world_size: current place among all ranks that take part. active_world_size: number of ranks that run
    the function; they are the ranks 0 to active_world_size-1. initial_rank, initial_world_size: values at the
    call. iteration: number of earlier iterations of this call. store: the present iteration's store, a
    StoreMixin. failed_beside_abort: when an exception left the function last, or a hook before it, the function had
    signalled no progress, and an abort of this rank's groups still ran that had begun more than hard_timeout before.
    Raises: ConfigurationError if the environment holds no valid rank."""

    rank: int = field(default_factory=lambda: rank_and_world_size()[0])
    world_size: int = field(default_factory=lambda: rank_and_world_size()[1])
    initial_rank: int = _UNSET
    initial_world_size: int = _UNSET
    active_world_size: int = _UNSET
    iteration: int = 0
    status: Status = Status.INITIALIZED
    store: Any = field(default=None, repr=False, compare=False)
    _abort_ends_at: float | None = field(default=None, init=False, repr=False, compare=False)  # monotonic seconds
    failed_beside_abort: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.initial_rank == _UNSET:
            self.initial_rank = self.rank
        if self.initial_world_size == _UNSET:
            self.initial_world_size = self.world_size
        if self.active_world_size == _UNSET:
            self.active_world_size = self.world_size

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            raise missing_in_state(self, name)

    @classmethod
    def from_environment(cls) -> State:
        """Return the state at the start of a call. Raises: ConfigurationError."""
        return cls()

    from_env = from_environment  # its name from release 0.3 of the compatible API on

    @classmethod
    def from_seat(cls, seat: Seat, store: Any = None, initial_world_size: int | None = None) -> State:
        """Return the state that a rank in this seat has at the next rank assignment. For a monitor that stands in."""
        return cls(
            rank=seat.rank,
            world_size=seat.world_size,
            initial_rank=seat.initial_rank,
            initial_world_size=seat.world_size if initial_world_size is None else initial_world_size,
            active_world_size=seat.active_world_size,
            iteration=max(0, seat.iteration),
            status=Status.INITIALIZED if seat.iteration == ENTRY else Status.ABORTING,
            store=store,
        )

    def get_distributed_vars(self) -> None:
        """Read rank and world_size from RANK and WORLD_SIZE. Raises: ConfigurationError."""
        self.rank, self.world_size = rank_and_world_size()

    def set_distributed_vars(self) -> None:
        """Set RANK and WORLD_SIZE for the function. WORLD_SIZE is the size of the active world."""
        os.environ["RANK"] = str(self.rank)
        os.environ["WORLD_SIZE"] = str(self.active_world_size)

    def abort_begins(self, limit: float) -> None:
        """Start the time that the abort hook may wait: `limit` seconds in all. The Wrapper calls it first."""
        self._abort_ends_at = time.monotonic() + limit

    def abort_time_left(self) -> float:
        """Return how many seconds the running abort hook may still wait, at least 0."""
        return ABORT_WAIT if self._abort_ends_at is None else max(0.0, self._abort_ends_at - time.monotonic())

    def activate_all_ranks(self) -> None:
        """Make every rank active, until a rank filter lowers the number."""
        self.active_world_size = self.world_size
        self.status = Status.ACTIVE

    def advance(self) -> None:
        """Move to the next iteration."""
        self.iteration += 1


if not TYPE_CHECKING:  # a type checker reports names that are not here

    def __getattr__(name: str) -> object:
        raise missing(__name__, name)
