"""What would a store answer?  The operations of `core.restart` on a dict, for tests and virtual clusters.

Nothing waits: `Await` returns whether the key is present now, and `when_present` registers a callback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilience.core.restart import Add, Await, Check, CompareSet, Operation, Read, Set


class MemoryStore:
    """A key-value store in memory. Every operation is atomic; one thread only."""

    __slots__ = ("_waiting", "data")

    def __init__(self) -> None:
        self.data: dict[str, str] = {}
        self._waiting: dict[str, list[Callable[[], None]]] = {}

    def perform(self, operation: Operation) -> Any:
        """Perform one store operation and return its answer. Raises: TypeError for any other operation."""
        data = self.data
        match operation:
            case Set(key, value):
                self._put(key, value)
                return None
            case Check(keys):
                return all(map(data.__contains__, keys))
            case Add(key, amount):
                total = int(data.get(key, "0")) + amount
                self._put(key, str(total))
                return total
            case CompareSet(key, value):
                if key not in data:
                    self._put(key, value)
                return data[key]
            case Read(keys):
                return tuple(map(data.get, keys))
            case Await(key):
                return key in data
            case _:
                raise TypeError(f"{type(operation).__name__} is not a store operation")

    def when_present(self, key: str, tell: Callable[[], None]) -> None:
        """Call `tell` once, when `key` is next written."""
        self._waiting.setdefault(key, []).append(tell)

    def _put(self, key: str, value: str) -> None:
        self.data[key] = value
        if key in self._waiting:
            for callback in self._waiting.pop(key):
                callback()
