"""Which place does a process have in an iteration?"""

from __future__ import annotations

import msgspec


class Seat(msgspec.Struct, frozen=True):
    """A rank's position in one iteration. Ranks are 0 … world_size-1; the first active_world_size of them are active.
    `initial_rank` identifies the rank for the whole call."""

    initial_rank: int
    rank: int
    world_size: int
    active_world_size: int
    iteration: int

    @property
    def is_active(self) -> bool:
        return self.rank < self.active_world_size
