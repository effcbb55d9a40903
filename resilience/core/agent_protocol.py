"""Which operations may a protocol of the launcher's agents yield?  Store operations, reading its own clock, a pause.

Like `core.restart`, these protocols are generators: they yield one operation at a time and receive its result. The
agent performs the operations on the job's store (`launcher.rendezvous.driving`). The simulation performs them on a
dict, under a virtual clock, and may end an agent before any of them (`tests/launcher_simulation`). Facts from outside
the protocol (the time, a signal, the highest step of this node's workers) are operations too.

There are two types of protocol. A `Protocol` needs the store, a clock and signals. A `NodeProtocol` may also ask for
what only an agent with workers and a record file can do. `Driver.run` accepts the first type only."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

import msgspec

from resilience.core import restart
from resilience.facts.events import Event

T = TypeVar("T")
Seconds = float


class Counts(msgspec.Struct, frozen=True):
    """Return the integers under `keys`, all of which are present."""

    keys: tuple[str, ...]


class Delete(msgspec.Struct, frozen=True):
    """Remove `key` if it is present."""

    key: str


class ReadClock(msgspec.Struct, frozen=True):
    """Return the time of this agent's own clock, in seconds."""


class Sleep(msgspec.Struct, frozen=True):
    """Wait for this many seconds."""

    seconds: Seconds


class AwaitKey(msgspec.Struct, frozen=True):
    """Wait until `key` may have been written, at most `limit` seconds, or until this agent is asked to stop waiting.
    Return True if the key may be present.

    The result is only a hint, and the wait costs the store one request, however long it takes. The agent reads the key
    itself, and checks it now and then without a hint. With a limit of 0 it only polls; the wait continues in the
    background."""

    key: str
    limit: Seconds = 0.0


class IsInterrupted(msgspec.Struct, frozen=True):
    """Return True if this agent was asked to stop waiting."""


class HighestStep(msgspec.Struct, frozen=True):
    """Return the highest training step that a worker of this node has reported, -1 before the first."""


class Emit(msgspec.Struct, frozen=True):
    """Record an event. cycle: the cycle that the event belongs to, None for the one that this agent is in. An agent
    without a seat in a cycle may decide what follows from it."""

    event: Event
    cycle: int | None = None


Operation = restart.Operation | Counts | Delete | ReadClock | Sleep | AwaitKey | IsInterrupted
NodeOperation = HighestStep | Emit
Protocol = Generator[Operation, Any, T]
NodeProtocol = Generator[Operation | NodeOperation, Any, T]
