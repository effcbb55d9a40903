"""Stamps events and hands them to sinks.  The only way out for what the toolkit has to say.

Emitting never raises and never blocks: a sink that cannot take a record answers False, and the loss is
counted and told with the next record that goes through. Imports nothing heavy: this is all of the
telemetry that a rank loads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from resilience.core.encoding import cleaned
from resilience.core.events import Event, TelemetryDropped
from resilience.core.identity import Origin
from resilience.core.records import Record
from resilience.ports import LossySink, Sink


class Emitter:
    """One process's voice. Safe to use from several threads: a number is drawn, then a record sent."""

    def __init__(self, origin: Origin, sinks: Sequence[Sink]) -> None:
        self.origin = origin
        self.replace_sinks(sinks)
        self._numbers = itertools.count()
        self._dropped = 0

    def move(self, **changes: Any) -> None:
        """Speak from another place (iteration, rank, step …) from now on."""
        self.origin = msgspec.structs.replace(self.origin, **changes)

    def replace_sinks(self, sinks: Sequence[Sink]) -> None:
        """Hand records to other sinks from now on."""
        self._sinks = tuple(sinks)
        self._lossy = [sink for sink in self._sinks if isinstance(sink, LossySink)]

    def emit(self, *new: Event) -> None:
        """State events, in this order."""
        for sink in self._lossy:
            self._dropped += sink.take_lost()
        for event in new:
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
        except Exception:  # the edge to user code: a field of a type that no event has
            return False
        return all([_take(sink, record) for sink in self._sinks])


def _take(sink: Sink, record: Record) -> bool:
    try:
        return sink.take(record)
    except Exception:  # the edge to any sink: what is broken there is a lost record here, and is counted
        return False
