"""What may a protocol of the launcher's agents ask for?  Operations on the job's store, its own clock, a pause.

Like `core.restart`, these protocols are generators: they yield one operation at a time and are sent its answer. The
agent performs the operations on the job's store (`launcher.driving`); the simulation performs them on a dict, under a
virtual clock, and may end an agent before any of them (`tests/launcher_simulation`). What is only known outside of the
protocol (the time, a signal, the highest step of this node's workers) is an operation too."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

import msgspec

from resilience.core import restart
from resilience.core.events import Event

T = TypeVar("T")
Seconds = float


class Counts(msgspec.Struct, frozen=True):
    """Answer the integers under `keys`, which are all present."""

    keys: tuple[str, ...]


class Delete(msgspec.Struct, frozen=True):
    """Remove `key` if it is there."""

    key: str


class Now(msgspec.Struct, frozen=True):
    """Answer the time by this agent's own clock, in seconds."""


class Sleep(msgspec.Struct, frozen=True):
    """Wait for so many seconds."""

    seconds: Seconds


class Watch(msgspec.Struct, frozen=True):
    """Wait until `key` may have been written, at most `limit` seconds, or until this agent is told to stop waiting.
    Answer True if it may be there.

    A hint that costs the store one request for any time: the agent reads the key itself, and looks at it now and then
    even if it is told nothing. With a limit of 0 it only asks, and the wait goes on beside whatever the agent does."""

    key: str
    limit: Seconds = 0.0


class IsInterrupted(msgspec.Struct, frozen=True):
    """Answer whether this agent was told to stop waiting."""


class HighestStep(msgspec.Struct, frozen=True):
    """Answer the highest training step that a worker of this node has reported, -1 before the first."""


class Emit(msgspec.Struct, frozen=True):
    """Put an event on record."""

    event: Event


Operation = restart.Operation | Counts | Delete | Now | Sleep | Watch | IsInterrupted | HighestStep | Emit
Protocol = Generator[Operation, Any, T]
