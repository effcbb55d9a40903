"""Runs the protocols of several ranks against one store in memory, in an order drawn from a seed.

No threads and no waiting: a protocol that awaits a key is left aside until the key is there. When nobody
can go on, the waits have run out."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from resilience.core.restart import Add, Await, Check, CompareSet, Operation, Read, Set

Begin = Callable[[], Generator[Any, Any, Any]]


@dataclass
class MemoryStore:
    """The operations of a protocol on a dict, and the widest of them."""

    data: dict[str, str] = field(default_factory=dict)
    widest: int = 0  # most keys in one operation

    def perform(self, operation: Operation) -> Any:
        match operation:
            case Set(key, value):
                self.data[key] = value
                return None
            case Add(key, amount):
                self.data[key] = str(int(self.data.get(key, "0")) + amount)
                return int(self.data[key])
            case CompareSet(key, value):
                return self.data.setdefault(key, value)
            case Check(keys):
                self.widest = max(self.widest, len(keys))
                return all(key in self.data for key in keys)
            case Read(keys):
                self.widest = max(self.widest, len(keys))
                return tuple(self.data.get(key) for key in keys)
        raise AssertionError(operation)


@dataclass
class _Running:
    begin: Begin
    protocol: Generator[Any, Any, Any]
    operation: Any = None
    operations: int = 0


def interleaved(
    begins: Mapping[int, Begin],
    chance: random.Random,
    store: MemoryStore | None = None,
    kill: tuple[int, int] | None = None,
) -> tuple[dict[int, Any], MemoryStore]:
    """Return each participant's result, or the exception it ended with, and the store.

    kill: (participant, n): it is killed once it has performed n operations, and begun again from the start,
    as a stand-in would."""
    store = store or MemoryStore()
    results: dict[int, Any] = {}
    running = {name: _Running(begin, begin()) for name, begin in begins.items()}

    def go_on(name: int, answer: Any) -> None:
        one = running[name]
        if kill == (name, one.operations) and one.operation is not None:
            one.protocol.close()
            one.protocol, answer, one.operations = begins[name](), None, 10**9
        try:
            one.operation = one.protocol.send(answer)
        except StopIteration as stop:
            results[name] = stop.value
        except Exception as error:
            results[name] = error
        if name in results:
            del running[name]

    for name in list(running):
        go_on(name, None)
    while running:
        ready = [name for name, one in running.items() if not _is_waiting(one.operation, store)]
        if not ready:
            go_on(chance.choice(sorted(running)), False)
            continue
        name = chance.choice(sorted(ready))
        one = running[name]
        one.operations += 1
        go_on(name, True if isinstance(one.operation, Await) else store.perform(one.operation))
    return results, store


def _is_waiting(operation: Any, store: MemoryStore) -> bool:
    return isinstance(operation, Await) and operation.key not in store.data
