"""Which seat does a rank get next?  Applies the user's assignment and filter to a State.

The rank and its stand-in run the same code, so that both compute the same seat."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from resilience.core.restart import ENTRY, Assign, Unassigned
from resilience.errors import InternalError, LeftInChild, RankDiscarded, RestartError
from resilience.facts.in_words import count
from resilience.facts.seats import Seat
from resilience.inprocess._runtime.forked import here_only
from resilience.inprocess.hook_store import CallStore, IterationStore
from resilience.inprocess.state import State
from resilience.system import call_with_timeout

if TYPE_CHECKING:
    from resilience.inprocess.rank_assignment import RankAssignment
    from resilience.inprocess.rank_filter import RankFilter


class Hooks(Protocol):
    """The parts of a Wrapper that an assignment needs."""

    rank_assignment: RankAssignment | None
    rank_filter: RankFilter | None


def assign(
    hooks: Hooks, state: State, terminated: frozenset[int], filter_begins: Callable[[], None] = lambda: None
) -> State:
    """Return the state of this rank in the next iteration.

    terminated: ranks of the present iteration that do not continue. filter_begins: called before the rank filter.
    Raises: RankDiscarded if this rank gets no seat, RestartError if the hook leaves terminated ranks in the world,
    InternalError if a hook broke the rules."""
    remaining = set(terminated)
    if hooks.rank_assignment is not None:
        state, remaining = _assigned(hooks.rank_assignment, state, remaining)
    if state.rank in remaining:
        raise RankDiscarded(f"rank {state.rank} is terminated and gets no seat in the next iteration")
    if remaining:
        raise RestartError(
            f"ranks {sorted(remaining)} are terminated and the rank assignment left them in the world; use an "
            "assignment that removes terminated ranks, such as ShiftRanks or FillGaps",
            terminated=frozenset(remaining),
        )
    state.activate_all_ranks()
    if hooks.rank_filter is not None:
        filter_begins()
        state = _filtered(hooks.rank_filter, state)
    if not 0 <= state.rank < state.world_size or not 0 <= state.active_world_size <= state.world_size:
        raise InternalError(
            f"after assignment and filter: rank {state.rank}, world size {state.world_size}, active world size "
            f"{state.active_world_size}; expected 0 <= rank < world size and 0 <= active <= world size"
        )
    return state


def _assigned(hook: RankAssignment, state: State, terminated: set[int]) -> tuple[State, set[int]]:
    returned: Any = hook(state, terminated)
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[0], State):
        raise InternalError(
            f"the rank_assignment {hook!r} returned {returned!r}, expected (state, terminated_ranks): the state, and "
            "the terminated ranks that are left, such as set()"
        )
    return returned[0], returned[1]


def _filtered(hook: RankFilter, state: State) -> State:
    returned: Any = hook(state)
    if not isinstance(returned, State):
        raise InternalError(f"the rank_filter {hook!r} returned {returned!r}, expected the state: return it")
    return returned


def nobody_active(state: State) -> RestartError:
    """Return the error for a rank filter that leaves no rank to run the function."""
    ranks = count(state.world_size, "rank")
    return RestartError(
        f"the rank filter leaves none of {ranks} active, so no rank would run the function; add ranks, or "
        f"choose a filter that {ranks} can satisfy"
    )


def seat_of(state: State, iteration: int) -> Seat:
    """Return the state's place as the protocol's Seat."""
    active = state.world_size if iteration == ENTRY else state.active_world_size
    return Seat(state.initial_rank, state.rank, state.world_size, active, iteration)


def seat_after(hooks: Hooks, operation: Assign, store: CallStore, initial_world_size: int) -> Seat | Unassigned | None:
    """Return the next seat of a rank that a stand-in represents, None if it gets none, Unassigned if a hook raises
    anything. Uses only its present seat, because the rank may have been interrupted during an assignment. store: the
    store for hooks."""
    if operation.place is not None:
        return operation.place
    seat = operation.seat
    state = State.from_seat(seat, IterationStore(seat, store), initial_world_size)
    try:
        return seat_of(here_only(lambda: assign(hooks, state, operation.terminated))(), seat.iteration + 1)
    except RankDiscarded:
        return None
    except (LeftInChild, KeyboardInterrupt):
        raise
    except BaseException:  # as it did in the rank itself, whose record has the error; sys.exit too
        return Unassigned(initial_world_size)


def seat_within(
    limit: float, hooks: Hooks, operation: Assign, store: CallStore, initial_world_size: int
) -> Seat | Unassigned | None:
    """Return the same as `seat_after`, or Unassigned if the hooks have not returned after `limit` seconds, because they
    wait as they did in the rank. Then they stay behind in their thread: `store` needs a connection of its own."""
    seats: list[Seat | Unassigned | None] = []

    def find() -> None:
        try:
            seats.append(seat_after(hooks, operation, store, initial_world_size))
        except LeftInChild:  # a hook has forked: the child is no monitor
            os._exit(0)

    if not call_with_timeout.returns_within(limit, find, "resilience-assign"):
        return Unassigned(initial_world_size)
    return seats[0]
