"""What a rank and its monitor say to each other, beside what the page shows.

One message a datagram, msgpack, tagged by kind; never pickle. A rank's message never blocks it."""

from __future__ import annotations

import msgspec

from resilience.core import restart, watch
from resilience.core.identity import Job, Origin
from resilience.core.records import Record


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A call begins: who speaks, which limits hold, where the account is kept.

    folder: the run folder. prefix: of the call's keys in the store. logfile: of the monitor itself."""

    origin: Origin
    folder: str
    prefix: str
    limits: watch.Limits
    waits: restart.Limits
    heartbeat_timeout: float
    interval: float
    base_host: str = ""
    job: Job | None = None  # from rank 0


class Emitted(msgspec.Struct, frozen=True, tag="emitted"):
    """A record of the rank."""

    record: Record


class Host(msgspec.Struct, frozen=True, tag="host"):
    """This rank is rank 0 of `iteration`: host the store of its process groups and publish it."""

    iteration: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From the monitor: it watches, and hosts the wrapper's store if that is its task; or why not."""

    error: str = ""


ToMonitor = Begin | Emitted | Host

_encoder = msgspec.msgpack.Encoder()
_to_monitor = msgspec.msgpack.Decoder(ToMonitor)
_to_rank = msgspec.msgpack.Decoder(Ready)


def encode(message: ToMonitor | Ready) -> bytes:
    """Return the message as one datagram."""
    return _encoder.encode(message)


def decode_for_monitor(message: bytes) -> ToMonitor:
    """Read a rank's message. Raises: msgspec.DecodeError."""
    decoded: ToMonitor = _to_monitor.decode(message)
    return decoded


def decode_for_rank(message: bytes) -> Ready:
    """Read a monitor's message. Raises: msgspec.DecodeError."""
    return _to_rank.decode(message)
