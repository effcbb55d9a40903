"""Where does a rank sit next?  Applies the user's assignment and filter to a State.

Used alike by the rank itself and by whoever stands in for it, so that both find the same seat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from resilience.core.restart import ENTRY, Assign, Seat
from resilience.errors import InternalError, RankDiscarded, RestartError
from resilience.inprocess.state import State
from resilience.inprocess.store import PrefixStore

if TYPE_CHECKING:
    from resilience.inprocess.rank_assignment import RankAssignment
    from resilience.inprocess.rank_filter import RankFilter


class Hooks(Protocol):
    """What an assignment needs of a Wrapper."""

    rank_assignment: RankAssignment | None
    rank_filter: RankFilter | None


def assign(hooks: Hooks, state: State, terminated: frozenset[int]) -> State:
    """Return the state of this rank in the next iteration.

    terminated: ranks of the present iteration that do not go on.
    Raises: RankDiscarded if this rank gets no seat, RestartError if terminated ranks are left over,
    InternalError if a hook broke the rules."""
    left = set(terminated)
    if hooks.rank_assignment is not None:
        state, left = hooks.rank_assignment(state, left)
    if state.rank in left:
        raise RankDiscarded(f"rank {state.rank} is terminated and gets no seat in the next iteration")
    if left:
        raise RestartError(
            f"ranks {sorted(left)} are terminated and the rank assignment left them in the world; use an "
            "assignment that removes terminated ranks, such as ShiftRanks or FillGaps",
            terminated=frozenset(left),
        )
    state.activate_all_ranks()
    if hooks.rank_filter is not None:
        state = hooks.rank_filter(state)
    if not 0 <= state.rank < state.world_size or not 0 <= state.active_world_size <= state.world_size:
        raise InternalError(
            f"after assignment and filter: rank {state.rank}, world size {state.world_size}, active world size "
            f"{state.active_world_size}; expected 0 <= rank < world size and 0 <= active <= world size"
        )
    return state


def nobody_active(state: State) -> RestartError:
    """Return the error of a rank filter that leaves nobody to run the function."""
    size = state.world_size
    return RestartError(
        f"the rank filter leaves none of {size} ranks active, so nobody would run the function; add ranks, or "
        f"choose a filter that {size} ranks can satisfy"
    )


def seat_of(state: State, iteration: int) -> Seat:
    """Return the state's place as the protocol knows it."""
    active = state.world_size if iteration == ENTRY else state.active_world_size
    return Seat(state.initial_rank, state.rank, state.world_size, active, iteration)


def seat_after(hooks: Hooks, operation: Assign, store: Any, initial_world_size: int | None) -> Seat | None:
    """Return the seat that a rank gets that is represented, None if it gets none. From its seat alone, because it may
    have been interrupted in the middle of an assignment. store: what hooks get."""
    seat = operation.seat
    state = State.from_seat(seat, PrefixStore(seat.iteration, store), initial_world_size)
    try:
        return seat_of(assign(hooks, state, operation.terminated), seat.iteration + 1)
    except RankDiscarded:
        return None
