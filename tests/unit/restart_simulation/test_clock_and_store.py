"""The virtual clock, and the store in memory beside torch's."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from resilience.core.restart import Add, Await, Check, CompareSet, Operation, Read, RunStage, Set, Stage
from resilience.system.store import execute
from tests.restart_simulation.clock import VirtualClock
from tests.restart_simulation.store import MemoryStore


def test_clock_jumps_from_one_thing_due_to_the_next() -> None:
    clock = VirtualClock()
    clock.after(5.0, "late")
    clock.after(1.0, "soon", 7)
    clock.after(5.0, "late too")
    assert clock.next() == ("soon", 7)
    assert clock.monotonic() == 1.0
    clock.after(1.0, "after that")
    assert [clock.next(), clock.next(), clock.next()] == [("after that",), ("late",), ("late too",)]
    assert clock.next() is None
    assert (clock.monotonic(), clock.wall_ns()) == (5.0, 5_000_000_000)


OPERATIONS: list[Operation] = [
    Check(("a", "b")),
    Set("a", "1"),
    Set("a", "2"),
    Set("b", "x"),
    Check(("a", "b")),
    Check(()),
    Read(("a", "nobody", "b")),
    Read(()),
    Add("count", 1),
    Add("count", 2),
    Add("looked at only", 0),
    Check(("looked at only",)),
    CompareSet("once", "first"),
    CompareSet("once", "second"),
    CompareSet("a", "third"),
    Await("once", 0.0),
    Await("nobody", 0.0),
]


def test_memory_store_answers_as_torch_does() -> None:
    """What holds in a virtual cluster would be worth nothing if its store were another."""
    memory, real = MemoryStore(), dist.HashStore()
    for operation in OPERATIONS:
        assert memory.perform(operation) == execute(operation, real), operation


def test_each_waiter_is_called_once_when_its_key_is_written() -> None:
    store, told = MemoryStore(), []
    store.when_present("k", lambda: told.append("a"))
    store.when_present("k", lambda: told.append("b"))
    store.perform(Set("other", "1"))
    assert told == []
    store.perform(CompareSet("k", "1"))
    store.perform(Set("k", "2"))
    assert told == ["a", "b"]


def test_what_is_no_store_operation_is_refused() -> None:
    with pytest.raises(TypeError, match="RunStage is not a store operation"):
        MemoryStore().perform(RunStage(Stage.FUNCTION))
