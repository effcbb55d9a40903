"""What is a record?  An event with sequence, times and origin. Records cross processes, fill files and are replayed.

The encoding is msgspec's: one JSON object per line in files, msgpack in the channel between a rank and its monitor.
Decoding accepts only what encoding produces. A torn line raises an error, and the reader counts it."""

from __future__ import annotations

import msgspec

from resilience.facts.encoding import lines_reader, reader, to_json
from resilience.facts.events import AnyEvent, Event
from resilience.facts.identity import Nanoseconds, Natural, Origin

SCHEMA = 1
EVENT = b'"event":{'
"""The beginning of the event in a line."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """One event with its position: `sequence` counts the records of one process from 0, so gaps are visible; `wall_ns`
    is UTC, for display; `mono_ns` orders the records of one host."""

    sequence: Natural
    wall_ns: Nanoseconds
    mono_ns: Nanoseconds
    origin: Origin
    event: AnyEvent
    schema: int = SCHEMA


_from_line = reader(Record)
_from_lines = lines_reader(Record)


def to_line(record: Record) -> bytes:
    """Return the record as one line of a record file, including the newline."""
    return to_json(record) + b"\n"


def from_line(line: bytes) -> Record:
    """Read a line back. Raises: DecodeError (also for a torn line)."""
    return _from_line(line)


def from_lines(lines: bytes) -> list[Record]:
    """Read many lines back, faster than one by one. Raises: DecodeError if any line is not a record."""
    return _from_lines(lines)


def beginnings(*kinds: type[Event]) -> tuple[bytes, ...]:
    """Return the bytes with which events of these kinds begin in a line."""
    return tuple(EVENT + f'"event":"{kind.__struct_config__.tag}"'.encode() for kind in kinds)
