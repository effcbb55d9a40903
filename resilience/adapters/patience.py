"""How long does a thread wait for an answer of the store?  Bounds every operation of one store client.

torch's store clients wait without a limit in C++: neither a signal nor an exception ends that, and the thread runs
no bytecode meanwhile. So each operation says before it begins when its answer is due; another thread calls `check`
now and then, and ends the client's own connection once the answer is overdue by more than the limit. The thread
then gets an error, and `adapters.store` makes a StoreError of it that says what was waited for. A host that is
stopped and goes on in time is nothing to anybody: its answer comes late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from resilience.adapters.connections import Connection, opened_by

T = TypeVar("T")

_here = threading.local()


class Patience:
    """The patience of one thread with one store client.

    client: the store; operations on others are not bounded. connections: its own, in this process. limit: seconds
    beyond the moment when an answer is due. asks, answered: called around each operation, by the
    thread that waits; `asks` with the seconds that the operation itself allows."""

    def __init__(
        self,
        client: Any,
        connections: Sequence[Connection],
        limit: float,
        asks: Callable[[float], None] = lambda allowed: None,
        answered: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = innermost(client)
        self.limit = limit
        self.ran_out_after: float | None = None  # seconds for which the operation had been waited for
        self._connections = connections
        self._asks = asks
        self._answered = answered
        self._waits: tuple[float, float] | None = None  # since when, and when the answer is due

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
        """End the connection of an operation that is overdue by more than the limit. From any other thread."""
        waits, now = self._waits, time.monotonic()
        if waits is not None and now >= waits[1] + self.limit:
            self.ran_out_after = now - waits[0]
            self.end()

    def end(self) -> None:
        """End the connections, and with them whatever is waited for. From any other thread."""
        for connection in self._connections:
            connection.shut_down()


@contextmanager
def bounded(patience: Patience) -> Iterator[None]:
    """Bound this thread's operations on the store of `patience` while the body runs."""
    _here.patience = patience
    try:
        yield
    finally:
        _here.patience = None


def current() -> Patience | None:
    """Return what bounds the store operations of this thread."""
    return getattr(_here, "patience", None)


def ask(store: Any, operation: Callable[[], T], allowed: float = 0.0) -> T:
    """Perform an operation on a store, bounded where this thread is. allowed: seconds that it may take by itself."""
    patience = current()
    if patience is None or not patience.is_for(store):
        return operation()
    return patience.ask(operation, allowed)


def connect(factory: Callable[[], Any]) -> tuple[Any, list[Connection]]:
    """Make a store; return it and the connections of its client, none where it has no server."""
    store, opened = opened_by(factory)
    port = getattr(innermost(store), "port", None)
    return store, [connection for connection in opened if connection.port == port]


def innermost(store: Any) -> Any:
    """Return the store without the prefixes around it."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store
