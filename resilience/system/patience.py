"""How long does a thread wait for an answer of the store?  Bounds every operation of one store client.

torch's store clients wait without a limit in C++. Neither a signal nor an exception ends that, and the thread runs no
bytecode meanwhile. So each operation first states when its answer is due. Another thread calls `check` from time to
time, and ends the client's own connection once the answer is overdue by more than the limit. The waiting thread then
gets an error, from which `system.store` makes a StoreError that names the operation. A host that is stopped and
continues in time does no harm: its answer is only late."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from resilience.core.standstills import REMEMBERED, Standstill, since_standstills
from resilience.system.open_sockets import Connection, opened_by

T = TypeVar("T")

STOOD_STILL = 5.0  # seconds by which a check came too late: this process was stopped, or its node was

_of_thread = threading.local()


class Patience:
    """Bounds the waiting of one thread with one store client.

    client: the store; operations on other stores are not bounded. connections: the client's own, in this process.
    limit: seconds beyond the moment when an answer is due. interval: seconds between two calls of `check`. asks,
    answered: called around each operation, by the waiting thread; `asks` with the seconds that the operation itself
    allows."""

    def __init__(
        self,
        client: Any,
        connections: Sequence[Connection],
        limit: float,
        interval: float,
        asks: Callable[[float], None] = lambda allowed: None,
        answered: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = innermost(client)
        self.limit = limit
        self.ran_out_after: float | None = None  # seconds that the operation had waited
        self._connections = connections
        self._asks = asks
        self._answered = answered
        self._waits: tuple[float, float] | None = None  # when the wait began, and when the answer is due
        self._interval = interval
        self._overdue: tuple[float, float] | None = None  # the wait that the last check found overdue
        self._checked_from = self._checked_at = math.inf
        self._standstills: deque[Standstill] = deque(maxlen=REMEMBERED)

    def ask(self, operation: Callable[[], T], allowed: float) -> T:
        try:
            self._asks(allowed)
            now = time.monotonic()
            self._waits = now, now + allowed
            return operation()
        finally:
            self._waits = None
            self._answered()

    def is_for(self, store: Any) -> bool:
        return innermost(store) is self._client

    def check(self) -> None:
        """End the connection of an operation that two checks have found overdue by more than the limit: after a short
        stop the answer may be there already. A longer time in which this process stood still does not count, because
        the store may have stood still too, nor does the time before the first check. From any other thread."""
        waits, now = self._waits, time.monotonic()
        if now - self._checked_at > STOOD_STILL + 2 * self._interval:
            self._standstills.append(Standstill(self._checked_at + self._interval, now))
        self._checked_from, self._checked_at = min(self._checked_from, now), now
        due_at = 0.0 if waits is None else max(waits[1], self._checked_from)
        if waits is None or now < since_standstills(self._standstills, due_at) + self.limit:
            return
        if self._overdue is waits:
            self.ran_out_after = now - waits[0]
            self.end()
        self._overdue = waits

    def end(self) -> None:
        """End the connections, and so every wait. From any other thread."""
        for connection in self._connections:
            connection.shut_down()


@contextmanager
def bounded(patience: Patience) -> Iterator[None]:
    """Bound this thread's operations on the store of `patience` while the body runs."""
    _of_thread.patience = patience
    try:
        yield
    finally:
        _of_thread.patience = None


def current() -> Patience | None:
    """Return the Patience of this thread, None if its operations are not bounded."""
    return getattr(_of_thread, "patience", None)


def ask(store: Any, operation: Callable[[], T], allowed: float = 0.0) -> T:
    """Perform a store operation, bounded if this thread is. allowed: seconds that it may take by itself."""
    patience = current()
    if patience is None or not patience.is_for(store):
        return operation()
    return patience.ask(operation, allowed)


def connect(factory: Callable[[], Any]) -> tuple[Any, list[Connection]]:
    """Create a store. Return it and its client's connections, none if it has no server.

    The kernel probes them: a client that waits for a key for days learns that the store's host has lost its power."""
    store, opened = opened_by(factory)
    port = getattr(innermost(store), "port", None)
    connections = [connection for connection in opened if connection.port == port]
    for connection in connections:
        connection.keep_alive()
    return store, connections


def innermost(store: Any) -> Any:
    """Return the store without the prefixes around it."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def server_of(store: Any) -> tuple[str, int] | None:
    """Return host and port of the server of a TCPStore, None for other stores."""
    client = innermost(store)
    host, port = getattr(client, "host", None), getattr(client, "port", None)
    return (host, port) if isinstance(host, str) and isinstance(port, int) else None
