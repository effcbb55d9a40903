"""Does the store at this address belong to this call?

Several calls of one process use one port. The monitor that hosted the last call's store may still serve a late rank
there while another rank has begun the next call. So rank 0's monitor writes into its store which call it serves, and
the other ranks wait for that key."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from resilience.errors import ServerGone, StoreError
from resilience.inprocess.store import Notice, hosting
from resilience.system import patience
from resilience.system.open_sockets import Connection
from resilience.system.store import wait

SERVING_PAUSE = 0.1  # seconds between two checks whether this call's store has replaced an earlier one


def connect(factory: Callable[..., Any], kwargs: dict[str, Any], notice: Notice, is_rank: bool = False) -> Any:
    """Return a connection to a store that another process hosts. Raises: what the factory raises."""
    with hosting(False, notice, is_rank):
        return factory(**kwargs)


def serving_key(notice: Notice) -> str:
    """Return the key under which rank 0's monitor notes that the store serves this call."""
    return f"{notice.prefix}serving"


def join(
    factory: Callable[..., Any], kwargs: dict[str, Any], notice: Notice, limit: float, is_rank: bool = False
) -> tuple[Any, list[Connection]]:
    """Return a client of this call's store, which another process hosts, and the client's connections.

    is_rank: this is the rank's own process, which has to learn why there is no store.

    After a process's first call, the monitor of an earlier call may still hold the port. This function then leaves that
    store and tries again. Raises: what the factory raises; StoreError after `limit` seconds."""
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
                f"the store serves an earlier call and was not replaced within {limit:g} s (barrier_timeout); check "
                "that rank 0 calls the wrapped function as often as the other ranks",
                limit=limit,
            )


def _serves(store: Any, key: str) -> bool:
    """Wait a moment for the note; return False also if the server ends meanwhile."""
    try:
        return wait(store, key, SERVING_PAUSE, SERVING_PAUSE)
    except StoreError:
        return False
