"""Runs a protocol against a real key-value store, and handles the exceptions of stores.

`drive` performs the operations that a `core.restart` protocol yields, one after another, on any object with the methods
of a torch Store. Waits are split into chunks, so that the waiting thread keeps running bytecode and notices a dead
server. If the store fails, the caller gets a StoreError; if a wait times out, it gets False."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from resilience.core import restart
from resilience.core.restart import Add, AddRecord, Await, AwaitOutcome, Check, CompareSet, Read, Set, SetRecord
from resilience.errors import StoreError
from resilience.facts.encoding import text
from resilience.system import patience
from resilience.system.patience import ask

T = TypeVar("T")
ABSENT = "resilience: no such key"  # as an expected value that no key has


class StoreLike(Protocol):
    """The methods of a torch Store that are used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...


def drive(
    protocol: restart.Protocol[T],
    store: StoreLike,
    perform: Callable[[restart.Operation], Any] | None = None,
    chunk: float = 1.0,
) -> T:
    """Run `protocol` to its end on `store` and return its result.

    perform: performs operations that are not store operations (Run, Assign), and may perform any other operation
    itself; NotImplemented leaves it to the store.
    chunk: longest single wait in seconds.
    Raises: what the protocol raises; StoreError if the store fails; what `perform` raises."""
    result: Any = None
    try:
        while True:
            operation = protocol.send(result)
            result = NotImplemented if perform is None else perform(operation)
            if result is NotImplemented:
                result = execute(operation, store, chunk)
    except StopIteration as stop:
        return cast(T, stop.value)
    finally:
        protocol.close()


def execute(operation: restart.Operation, store: StoreLike, chunk: float = 1.0) -> Any:
    """Perform one store operation. Raises: StoreError."""
    perform = _PERFORM.get(type(operation))
    if perform is None:
        raise TypeError(f"{type(operation).__name__} is not a store operation")
    try:
        return perform(operation, store, chunk)
    except (RuntimeError, ValueError, LookupError, OSError) as error:
        raise lost(operation, error) from error


def _set(operation: Set, store: StoreLike, chunk: float) -> None:
    ask(store, partial(store.set, text(operation.key), text(operation.value)))


def _add(operation: Add, store: StoreLike, chunk: float) -> int:
    return ask(store, partial(store.add, text(operation.key), operation.amount))


def _compare_set(operation: CompareSet, store: StoreLike, chunk: float) -> str:
    return text(ask(store, partial(store.compare_set, text(operation.key), "", text(operation.value))))


def _check(operation: Check, store: StoreLike, chunk: float) -> bool:
    return bool(ask(store, partial(store.check, [text(key) for key in operation.keys])))


def _read(operation: Read, store: StoreLike, chunk: float) -> tuple[str | None, ...]:
    return tuple(_values(store, [text(key) for key in operation.keys]))


def _await(operation: Await, store: StoreLike, chunk: float) -> bool:
    return wait(store, text(operation.key), operation.limit, chunk)


# By type: a `match` checks each case in turn, and 256 processes that wake at once have cold caches.
_PERFORM: dict[type, Callable[[Any, StoreLike, float], Any]] = {
    Set: _set,
    SetRecord: _set,
    Add: _add,
    AddRecord: _add,
    CompareSet: _compare_set,
    Check: _check,
    Read: _read,
    Await: _await,
    AwaitOutcome: _await,
}


def counts(store: Any, keys: list[str]) -> list[int]:
    """Return the integers under keys that all exist, in one operation if the store can do that.

    Raises: StoreError."""
    try:
        if store.has_extended_api():
            return [int(value) for value in ask(store, lambda: store.multi_get(keys))]
        return [int(ask(store, partial(store.get, key))) for key in keys]
    except (RuntimeError, ValueError, LookupError, OSError) as error:
        raise lost(Read(tuple(keys)), error) from error


def delete(store: Any, key: str) -> None:
    """Remove a key if it exists. Raises: StoreError."""
    try:
        ask(store, partial(store.delete_key, text(key)))
    except (RuntimeError, ValueError, LookupError, OSError) as error:
        raise lost(Read((key,)), error) from error


def wait(
    store: StoreLike,
    key: str,
    limit: float,
    chunk: float = 1.0,
    give_up: Callable[[], bool] | None = None,
) -> bool:
    """Wait until `key` is present, at most `limit` seconds. Return True if it is.

    give_up: called after each chunk; True ends the wait early. Raises: StoreError."""
    deadline = time.monotonic() + limit
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or (give_up is not None and give_up()):
            return _is_present(store, key)
        try:
            pause = max(0.001, min(remaining, chunk))
            ask(store, partial(store.wait, [key], timedelta(seconds=pause)), pause)
            return True
        except (RuntimeError, ValueError, LookupError, OSError):
            # A timeout and a dead server raise the same error: reading the key tells them apart.
            if _is_present(store, key):
                return True


def _is_present(store: StoreLike, key: str) -> bool:
    try:
        return bool(ask(store, lambda: store.check([key])))
    except (RuntimeError, ValueError, LookupError, OSError) as error:
        raise lost(Await(key, 0.0), error) from error


def lost(operation: restart.Operation, error: BaseException) -> StoreError:
    """Return the error for a store that does not answer."""
    bound = patience.current()
    if bound is not None and bound.ran_out_after is not None:
        key = getattr(operation, "key", None) or ", ".join(getattr(operation, "keys", ()))
        return StoreError(
            f"the store did not answer {type(operation).__name__} of {key!r} within {bound.ran_out_after:.1f} s; the "
            f"limit is {bound.limit:g} s (barrier_timeout). The process that hosts the store (rank 0's monitor, or the "
            "launcher's store process) is stopped, or its node is overloaded or unreachable. Check it; raise "
            "barrier_timeout if that host may be unavailable for longer",
            operation=operation,
            key=key,
            waited_s=bound.ran_out_after,
            limit=bound.limit,
        )
    reason, _, _ = str(error).partition("\n")
    return StoreError(
        f"the store did not answer {operation}: {type(error).__name__}: {reason[:200]}; "
        "its host process or node is gone or unreachable, so this process cannot continue",
        operation=operation,
    )


def _values(store: Any, keys: list[str]) -> list[str | None]:
    """Return the values of keys, None for an absent one. Takes two operations for many keys that all exist.

    Builds a list, not a generator inside tuple(): if another thread calls gc.get_objects() meanwhile, that returns the
    half-built tuple, and CPython 3.11 then raises SystemError."""
    one_by_one = partial(_value_of_server if _has_server(store) else _value, store)
    values: list[bytes] = []
    if len(keys) > 2 and store.has_extended_api() and ask(store, lambda: store.check(keys)):
        try:
            values = ask(store, lambda: store.multi_get(keys))
        except RuntimeError:  # TCPStore waits for all keys, in vain if another client has just deleted one
            pass
    if not values:
        return [ask(store, partial(one_by_one, key)) for key in keys]
    # An empty value may be that of a deleted key, too.
    return [
        text(value) if value else ask(store, partial(one_by_one, key)) for key, value in zip(keys, values, strict=True)
    ]


def _value(store: StoreLike, key: str) -> str | None:
    """Return the value of a key, None if it is absent."""
    try:
        return text(store.get(key)) if store.check([key]) else None
    except LookupError:  # it was deleted in between
        return None


def _value_of_server(store: StoreLike, key: str) -> str | None:
    """Return the value of a key in a TCPStore, None if it is absent.

    `get` waits for a key that was deleted since the check, until the client's timeout, or returns b"". A `compare_set`
    that fails does neither. It needs the check first: the server wakes all clients that wait for the key, as if it
    existed (torch 2.13)."""
    if not store.check([key]):
        return None
    value = text(store.compare_set(key, ABSENT, ABSENT))
    return None if value == ABSENT else value


def _has_server(store: Any) -> bool:
    """Return True for a TCPStore. Imports no torch by itself."""
    kind = getattr(sys.modules.get("torch.distributed"), "TCPStore", None)
    return kind is not None and isinstance(patience.innermost(store), kind)
