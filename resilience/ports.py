"""The protocols that the shells are written against."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from resilience.facts.records import Record


class Clock(Protocol):
    """Seconds on a monotonic clock, and wall time for display only."""

    def monotonic(self) -> float: ...

    def wall_ns(self) -> int: ...


class Sink(Protocol):
    """Takes records. Never raises and never blocks. `take` returns True if the sink took the record."""

    def take(self, record: Record) -> bool: ...


@runtime_checkable
class LossySink(Protocol):
    """A sink that may lose a record after taking it. `take_lost` returns the number lost since its last call."""

    def take_lost(self) -> int: ...
