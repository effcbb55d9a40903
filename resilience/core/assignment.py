"""Who sits where once some ranks are gone?  Pure functions from a seat to the seat after it.

Everybody computes the seats of all from the same two facts, the present seat and the agreed set of
terminated ranks, so that nobody has to be told. All remaining ranks are active; a filter may lower that
afterwards."""

from __future__ import annotations

from resilience.core.restart import Seat


def shift(seat: Seat, terminated: frozenset[int]) -> Seat | None:
    """Return the seat after ranks have moved up by the terminated ones below them, None for a terminated rank."""
    if seat.rank in terminated:
        return None
    return _seat(seat, seat.rank - sum(rank < seat.rank for rank in terminated), len(terminated))


def fill_gaps(seat: Seat, terminated: frozenset[int]) -> Seat | None:
    """Return the seat after the highest ranks have taken the places of terminated ones, None for a terminated
    rank. As few ranks as possible change."""
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
