"""Performs the operations of an agent's protocols: on the job's store, with this process's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar, cast

from resilience.core.agent_protocol import (
    AwaitKey,
    Counts,
    Delete,
    IsInterrupted,
    NodeOperation,
    NodeProtocol,
    Operation,
    Protocol,
    ReadClock,
    Sleep,
)
from resilience.errors import StoreError
from resilience.launcher.rendezvous.key_watch import KeyWatch
from resilience.system.store import StoreLike, counts, delete, execute

T = TypeVar("T")
Asked = TypeVar("Asked")


class Driver:
    """Runs protocols of one agent. One thread."""

    def __init__(
        self,
        store: StoreLike,
        is_interrupted: Callable[[], bool],
        why_cut_off: Callable[[], str] = lambda: "",
        watch: KeyWatch | None = None,
    ) -> None:
        """store: the job's; why_cut_off: called before each operation on the store, returns why this agent may not use
        it any more, empty if it may; watch: waits for keys of the store, for protocols that need it."""
        self._store = store
        self._watch = watch
        self._is_interrupted = is_interrupted
        self._why_cut_off = why_cut_off

    def run(self, protocol: Protocol[T]) -> T:
        """Run a protocol to its end and return its result.

        Raises: what the protocol raises; StoreError if the store fails, or this agent may not use it."""
        return _drive(protocol, self._perform)

    def run_for_node(self, protocol: NodeProtocol[T], perform: Callable[[NodeOperation], Any]) -> T:
        """Run a protocol that may ask for more than the store, a clock and signals; `perform` does the rest.

        Raises: as `run`, and what `perform` raises."""

        def perform_any(operation: Operation | NodeOperation) -> Any:
            return perform(operation) if isinstance(operation, NodeOperation) else self._perform(operation)

        return _drive(protocol, perform_any)

    def _perform(self, operation: Operation) -> Any:
        match operation:
            case ReadClock():
                return time.monotonic()
            case Sleep(seconds):
                return time.sleep(seconds)
            case IsInterrupted():
                return self._is_interrupted()
            case AwaitKey(key, limit):
                assert self._watch is not None
                self._check_store()
                return self._watch.wait(key, limit, self._is_interrupted)
            case Counts(keys):
                return counts(self._usable_store, list(keys))
            case Delete(key):
                return delete(self._usable_store, key)
            case _:
                return execute(operation, self._usable_store)

    @property
    def _usable_store(self) -> StoreLike:
        self._check_store()
        return self._store

    def _check_store(self) -> None:
        """Raises: StoreError if this agent may not use the store any more."""
        if reason := self._why_cut_off():
            raise StoreError(f"the job's store is unreachable: {reason}")


def _drive(protocol: Generator[Asked, Any, T], perform: Callable[[Asked], Any]) -> T:
    """Perform each operation of a protocol, and return the protocol's result."""
    answer: Any = None
    try:
        while True:
            answer = perform(protocol.send(answer))
    except StopIteration as stop:
        return cast(T, stop.value)
    finally:
        protocol.close()
