"""How do ranks without a launcher learn that rank 0's monitor cannot host their store?

There is no other store to say so. So that monitor still serves a store at the agreed address for a short while, and
puts only the reason into it. Every other rank reads one key when it connects: the key says that the store is hosted,
or why not."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

import torch.distributed as dist

from resilience.core.restart import Check, Read, Set
from resilience.errors import ServerGone, StoreError
from resilience.system.client_sockets import short_lookups
from resilience.system.store import execute, wait

KEY = "resilience/hosted"
HOSTED = "yes"
LIMIT = 60.0  # seconds for the other ranks to read the reason
LOOK_EVERY = 0.1  # seconds
CHUNK = 5.0  # seconds of one wait


class RefusedStore:
    """A store that only holds the reason why there is no real one. Served by the process that should have hosted it."""

    def __init__(self, listener: socket.socket, host: str, size: int, reason: str) -> None:
        """size: number of ranks of the job. Raises: StoreError."""
        port = listener.getsockname()[1]
        self._size = size
        try:
            with short_lookups():
                self._store = dist.TCPStore(
                    host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
                )
        except (RuntimeError, ValueError) as error:
            raise StoreError(reason) from error
        execute(Set(KEY, reason), self._store)

    def await_read(self) -> None:
        """Wait until all other ranks have read the reason, LIMIT seconds at most."""
        deadline = time.monotonic() + LIMIT
        with contextlib.suppress(StoreError):
            while not self.is_read() and time.monotonic() < deadline:
                time.sleep(LOOK_EVERY)

    def is_read(self) -> bool:
        """Return whether all other ranks have read the reason. Raises: StoreError."""
        return bool(execute(Check(tuple(f"{KEY}/{rank}" for rank in range(1, self._size))), self._store))


def accept(store: Any) -> None:
    """Write that the store is hosted. Raises: StoreError."""
    execute(Set(KEY, HOSTED), store)


def raise_if_refused(store: Any, rank: int | None, limit: float) -> None:
    """Raise if the store only holds a refusal, with its reason, or if it holds neither within `limit` seconds.

    rank: the rank whose process reads; None in a monitor, because its rank has to read the reason too.
    Raises: StoreError; ServerGone if a new connection may help."""
    try:
        if not wait(store, KEY, limit, CHUNK):
            raise StoreError(
                f"a store answers at this address, but rank 0's monitor did not confirm within {limit:g} s that it "
                "hosts it"
            )
        (answer,) = execute(Read((KEY,)), store)
    except StoreError as error:
        if error.__cause__ is None:
            raise
        raise ServerGone(str(error)) from error
    if answer != HOSTED:
        if rank is not None:
            execute(Set(f"{KEY}/{rank}", "1"), store)
        raise StoreError(str(answer))
