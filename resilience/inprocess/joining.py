"""Is the store at this address that of this call?

Several calls of one process use one port. The monitor that hosted the store of the last call may still serve a late
rank there while another rank has begun the next call. So rank 0's monitor notes in its store which call it serves, and
the others look for that note."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from resilience.adapters import patience
from resilience.adapters.connections import Connection
from resilience.adapters.store import wait
from resilience.errors import ServerGone, StoreError
from resilience.inprocess.store import Notice, hosting

SERVING_PAUSE = 0.1  # seconds between two looks whether the store of an earlier call has been replaced


def connect(factory: Callable[..., Any], kwargs: dict[str, Any], notice: Notice, is_rank: bool = False) -> Any:
    """Return a connection to a store that another process hosts. Raises: what the factory raises."""
    with hosting(False, notice, is_rank):
        return factory(**kwargs)


def serving_key(notice: Notice) -> str:
    """Where the monitor of rank 0 notes that the store serves this call."""
    return f"{notice.prefix}serving"


def join(
    factory: Callable[..., Any], kwargs: dict[str, Any], notice: Notice, limit: float, is_rank: bool = False
) -> tuple[Any, list[Connection]]:
    """Return a client of this call's store, which another process hosts, and the client's connections.

    is_rank: this is the rank's own process, which is to learn why there is no store.

    After the first call of a process, the monitor of an earlier call may still hold the port: its store is left again
    until the one of this call is there. Raises: what the factory raises; StoreError after `limit` seconds."""
    deadline = time.monotonic() + limit
    while True:
        try:
            store, opened = patience.connect(lambda: connect(factory, kwargs, notice, is_rank))
        except ServerGone:
            if time.monotonic() >= deadline:
                raise
            time.sleep(SERVING_PAUSE)
            continue
        if notice.call == 0 or _serves(store, serving_key(notice)):
            return store, opened
        if time.monotonic() >= deadline:
            raise StoreError(
                f"the store serves an earlier call and was not replaced within {limit:g} s (barrier_timeout); look "
                "whether rank 0 calls the wrapped function as often as the other ranks",
                limit=limit,
            )


def _serves(store: Any, key: str) -> bool:
    """Wait a moment for the note; False also where the server ends meanwhile."""
    try:
        return wait(store, key, SERVING_PAUSE, SERVING_PAUSE)
    except StoreError:
        return False
