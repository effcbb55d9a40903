"""Performs what the protocols of an agent ask for: on the job's store, by this process's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from resilience.adapters.store import StoreLike, counts, delete, execute
from resilience.core import restart
from resilience.core.agent_protocol import (
    Counts,
    Delete,
    Emit,
    HighestStep,
    IsInterrupted,
    Now,
    Protocol,
    Sleep,
    Watch,
)
from resilience.errors import StoreError
from resilience.launcher.key_watch import KeyWatch

T = TypeVar("T")
_Operation = restart.Operation | Counts | Delete | Now | Sleep | Watch | IsInterrupted


class Driver:
    """Runs protocols of one agent. One thread."""

    def __init__(
        self,
        store: StoreLike,
        is_interrupted: Callable[[], bool],
        why_cut_off: Callable[[], str] = lambda: "",
        watch: KeyWatch | None = None,
    ) -> None:
        """store: the job's; why_cut_off: asked before each operation on it, why this agent may no longer use it, empty
        if it may; watch: waits for keys of it, for protocols that ask for that."""
        self._store = store
        self._watch = watch
        self._is_interrupted = is_interrupted
        self._why_cut_off = why_cut_off

    def run(self, protocol: Protocol[T], perform: Callable[[Emit | HighestStep], Any] | None = None) -> T:
        """Run a protocol to its end and return its result.

        perform: performs what is no business of the store, for protocols that ask for it.
        Raises: what the protocol raises; StoreError if the store fails, or this agent may not use it."""
        answer: Any = None
        try:
            while True:
                operation = protocol.send(answer)
                if isinstance(operation, Emit | HighestStep):
                    assert perform is not None
                    answer = perform(operation)
                else:
                    answer = self._perform(operation)
        except StopIteration as stop:
            return cast(T, stop.value)
        finally:
            protocol.close()

    def _perform(self, operation: _Operation) -> Any:
        match operation:
            case Now():
                return time.monotonic()
            case Sleep(seconds):
                return time.sleep(seconds)
            case IsInterrupted():
                return self._is_interrupted()
        if why_not := self._why_cut_off():
            raise StoreError(f"the job's store is out of reach: {why_not}")
        if isinstance(operation, Watch):
            assert self._watch is not None
            return self._watch.wait(operation.key, operation.limit, self._is_interrupted)
        if isinstance(operation, Counts):
            return counts(self._store, list(operation.keys))
        if isinstance(operation, Delete):
            return delete(self._store, operation.key)
        return execute(operation, self._store)
