"""An event, stamped: what crosses processes, fills the record files and is replayed.

The wire form is msgspec's: one JSON object a line in files, msgpack in the channel between a rank and
its monitor. Decoding accepts exactly what encoding made; a torn line raises and is the reader's to
count."""

from __future__ import annotations

import msgspec

from resilience.core.events import AnyEvent
from resilience.core.identity import Origin

SCHEMA = 1


class Record(msgspec.Struct, frozen=True):
    """One event with its place: `sequence` counts the records of one process from 0, so that gaps
    show; `wall_ns` is UTC and for display; `mono_ns` orders the records of one host."""

    sequence: int
    wall_ns: int
    mono_ns: int
    origin: Origin
    event: AnyEvent
    schema: int = SCHEMA


_json_encoder = msgspec.json.Encoder()
_json_decoder = msgspec.json.Decoder(Record)
_wire_encoder = msgspec.msgpack.Encoder()
_wire_decoder = msgspec.msgpack.Decoder(Record)


def to_line(record: Record) -> bytes:
    """Return the record as one line of a record file, newline included."""
    return _json_encoder.encode(record) + b"\n"


def from_line(line: bytes) -> Record:
    """Read a line back. Raises: msgspec.DecodeError (also for a torn line)."""
    return _json_decoder.decode(line)


def to_wire(record: Record) -> bytes:
    """Return the record as one message of the channel."""
    return _wire_encoder.encode(record)


def from_wire(message: bytes) -> Record:
    """Read a message back. Raises: msgspec.DecodeError."""
    return _wire_decoder.decode(message)
