"""Which store operations do a rank and its monitor share?

They are not in `inprocess._runtime.monitor_store`, because a rank imports that module only at its first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from resilience.core import restart
from resilience.core.restart import Keys, Read
from resilience.errors import StoreError, error_in_words
from resilience.facts import events
from resilience.facts.interruptions import InterruptionRecord
from resilience.system.store import StoreLike, execute, wait


def is_of_store(error: BaseException) -> bool:
    """Return True if an error says that a store is not there or does not answer: ours, or one of a user's factory."""
    return isinstance(error, StoreError | dist.DistNetworkError | dist.DistStoreError | ConnectionError)


def failure_of(work: str, error: BaseException) -> events.Event:
    """Return the event for a part of a monitor's work that an error has ended."""
    if is_of_store(error):
        return events.StoreLost(f"{work}: {error_in_words(error)}")
    return events.HookFailed(work, error_in_words(error))


def not_hosted(iteration: int, error: BaseException) -> events.HookFailed:
    """Return the event for a store of an iteration that this process could not host. No store is lost by that."""
    return events.HookFailed(
        "hosting", f"the store of iteration {iteration} could not be hosted: {error_in_words(error)}"
    )


def note_arrival(
    operation: restart.Operation, store: StoreLike, record: InterruptionRecord, emit: Callable[..., None]
) -> Any:
    """Perform the operation that gives `record` its place in the order of arrival, and emit that place.
    Return NotImplemented for any other operation."""
    if not isinstance(operation, restart.AddRecord):
        return NotImplemented
    position = execute(operation, store)
    arrived = events.InterruptionArrived(
        record.rank, record.interruption, operation.iteration, position, operation.fault_of
    )
    emit(arrived)
    return position


def ensure_server(
    iteration: int,
    store: StoreLike,
    limit: float,
    chunk: float,
    give_up: Callable[[], bool],
    host: Callable[[], None],
) -> None:
    """Call `host` if the iteration's store is not published within `limit` seconds: rank 0's monitor may be stopped, or
    may have died with the request. give_up: returns True once the iteration needs no store. Raises: StoreError."""
    if not wait(store, Keys(iteration).server, limit, chunk, give_up) and not give_up():
        host()  # if it cannot, the monitor may still publish one: `await_server` waits for it


def await_server(
    iteration: int, store: StoreLike, limit: float, chunk: float, give_up: Callable[[], bool]
) -> str | None:
    """Return the address (host:port) of the store for an iteration's process groups. Return None if there will be none,
    or if `give_up` returns True before it is published. Raises: StoreError."""
    key = Keys(iteration).server
    wait(store, key, limit, chunk, give_up)
    (address,) = execute(Read((key,)), store)
    if address is None and not give_up():
        raise StoreError(
            f"no store for the process groups of iteration {iteration} was published within {limit:g} s "
            "(barrier_timeout); rank 0's monitor hosts it: is that process stopped, or its node overloaded?",
            key=key,
            limit=limit,
        )
    return None if address == restart.NO_SERVER else address
