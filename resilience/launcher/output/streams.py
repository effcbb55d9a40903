"""Messages between the agent and its drain process about workers' output. One msgpack message per datagram."""

from __future__ import annotations

from typing import Literal

import msgspec

from resilience.facts.encoding import reader, to_msgpack


class OpenStream(msgspec.Struct, frozen=True, tag="open"):
    """Drain a stream; its descriptor is attached.

    name: for people. path: the output file, from `os.fsencode`, rotated at `limit` bytes (0: never). to: 1 for
    stdout, 2 for stderr, 0 for neither. missing: bytes that the file lacks at its end, because `why_missing`."""

    number: int
    name: str
    path: bytes
    limit: int
    to: int
    missing: int = 0
    why_missing: str = ""


class FinishStreams(msgspec.Struct, frozen=True, tag="finish"):
    """Pass on the remaining output: the workers have ended, and no new stream will be opened. patience: seconds without
    progress after which a reader is given up, if that is less than usual."""

    patience: float = 60.0


class ProbeDrain(msgspec.Struct, frozen=True, tag="probe"):
    """Ask whether the drain process still reads."""


class Reading(msgspec.Struct, frozen=True, tag="reading"):
    """Answer a probe: the drain process reads."""


class StreamLost(msgspec.Struct, frozen=True, tag="lost"):
    """Report output that is missing in a place.

    place: "file": it could not be written. "rotated": it was written, then removed by rotation. "terminal": it was
    not shown. count: bytes of this stream and place so far. unsaid: bytes of these that no terminal line mentions.
    is_shown: the terminal shows this stream."""

    name: str
    path: bytes
    place: Literal["file", "rotated", "terminal"]
    count: int
    why: str = ""
    unsaid: int = 0
    is_shown: bool = True


class StreamClosed(msgspec.Struct, frozen=True, tag="closed"):
    """Report the end of a stream: no process can write to it."""

    number: int


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Report that everything possible is passed on. Streams that a worker's child still holds are drained further."""


encode = to_msgpack
ToDrain = OpenStream | ProbeDrain | FinishStreams
FromDrain = Reading | StreamLost | StreamClosed | Finished
decode_for_drain = reader(ToDrain, "msgpack")
decode_for_agent = reader(FromDrain, "msgpack")
