"""Which rank does each process get after some ranks are gone?  Pure functions from a seat to the next seat.

Every process computes its seat from the same two facts: its present seat and the agreed set of terminated ranks. So no
message is needed. All remaining ranks are active; a filter may lower their number later."""

from __future__ import annotations

from resilience.facts.seats import Seat


def shift(seat: Seat, terminated: frozenset[int]) -> Seat | None:
    """Return the seat after each rank moves down by the number of terminated ranks below it, None if terminated."""
    if seat.rank in terminated:
        return None
    return _seat(seat, seat.rank - sum(rank < seat.rank for rank in terminated), len(terminated))


def fill_gaps(seat: Seat, terminated: frozenset[int]) -> Seat | None:
    """Return the seat after the highest ranks replace the terminated ones, None for a terminated rank. As few ranks as
    possible change."""
    if seat.rank in terminated:
        return None
    size = seat.world_size - len(terminated)
    if seat.rank < size:
        return _seat(seat, seat.rank, len(terminated))
    movers = (rank for rank in range(size, seat.world_size) if rank not in terminated)
    gaps = (rank for rank in range(size) if rank in terminated)
    return _seat(seat, dict(zip(movers, gaps, strict=True))[seat.rank], len(terminated))


def _seat(seat: Seat, rank: int, left: int) -> Seat:
    size = seat.world_size - left
    return Seat(seat.initial_rank, rank, size, size, seat.iteration + 1)
