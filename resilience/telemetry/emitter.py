"""Stamps events and passes them to sinks: the toolkit's only output channel.

Emitting never raises and never blocks: a sink that cannot take a record returns False; the loss is counted and reported
with the next record that gets through. Imports nothing heavy: a rank loads no other telemetry."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from resilience.facts.encoding import cleaned
from resilience.facts.events import Event, TelemetryDropped
from resilience.facts.identity import Origin
from resilience.facts.records import Record


class Sink(Protocol):
    """Takes records. Never raises and never blocks. `take` returns True if the sink took the record."""

    def take(self, record: Record) -> bool: ...


@runtime_checkable
class LossySink(Protocol):
    """A sink that may lose a record after taking it. `take_lost` returns the number lost since its last call."""

    def take_lost(self) -> int: ...


class Emitter:
    """Emits the events of one process. Thread-safe: it draws a number, then sends a record."""

    def __init__(self, origin: Origin, sinks: Sequence[Sink]) -> None:
        self.origin = origin
        self.replace_sinks(sinks)
        self._numbers = itertools.count()
        self._dropped = 0

    def move(self, **changes: Any) -> None:
        """Change fields of the origin (iteration, rank, step …) from now on."""
        self.origin = msgspec.structs.replace(self.origin, **changes)

    def replace_sinks(self, sinks: Sequence[Sink]) -> None:
        """Use other sinks from now on."""
        self._sinks = tuple(sinks)
        self._lossy = [sink for sink in self._sinks if isinstance(sink, LossySink)]

    def emit(self, *events: Event) -> None:
        """Emit events, in this order."""
        for sink in self._lossy:
            self._dropped += sink.take_lost()
        for event in events:
            if self._dropped and self._hand_out(TelemetryDropped("record", "sink", self._dropped)):
                self._dropped = 0
            if not self._hand_out(event):
                self._dropped += 1

    def _hand_out(self, event: Event) -> bool:
        record = Record(
            sequence=next(self._numbers),
            wall_ns=time.time_ns(),
            mono_ns=time.monotonic_ns(),
            origin=self.origin,
            event=event,  # type: ignore[arg-type]  # every Event is in the catalogue
        )
        try:
            record = cleaned(record)
        except Exception:  # edge to user code: a field of an unexpected type
            return False
        return all([_take(sink, record) for sink in self._sinks])


def _take(sink: Sink, record: Record) -> bool:
    try:
        return sink.take(record)
    except Exception:  # edge to any sink: a failure there is a lost record here, and is counted
        return False
