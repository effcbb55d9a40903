"""An event, stamped: what crosses processes, fills the record files and is replayed.

The wire form is msgspec's: one JSON object a line in files, msgpack in the channel between a rank and
its monitor. Decoding accepts exactly what encoding made; a torn line raises and is the reader's to
count."""

from __future__ import annotations

import msgspec

from resilience.core.encoding import reader, to_json, to_msgpack
from resilience.core.events import AnyEvent
from resilience.core.identity import Nanoseconds, Natural, Origin

SCHEMA = 1


class Record(msgspec.Struct, frozen=True):
    """One event with its place: `sequence` counts the records of one process from 0, so that gaps
    show; `wall_ns` is UTC and for display; `mono_ns` orders the records of one host."""

    sequence: Natural
    wall_ns: Nanoseconds
    mono_ns: Nanoseconds
    origin: Origin
    event: AnyEvent
    schema: int = SCHEMA


_from_line = reader(Record)
_from_wire = reader(Record, "msgpack")


def to_line(record: Record) -> bytes:
    """Return the record as one line of a record file, newline included."""
    return to_json(record) + b"\n"


def from_line(line: bytes) -> Record:
    """Read a line back. Raises: DecodeError (also for a torn line)."""
    return _from_line(line)


def to_wire(record: Record) -> bytes:
    """Return the record as one message of the channel."""
    return to_msgpack(record)


def from_wire(message: bytes) -> Record:
    """Read a message back. Raises: DecodeError."""
    return _from_wire(message)
