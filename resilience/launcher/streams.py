"""What the agent and its drain process say to each other about workers' output. One message a datagram, msgpack."""

from __future__ import annotations

from typing import Literal

import msgspec

from resilience.core.encoding import reader, to_msgpack


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Drain a stream; its descriptor comes along.

    name: for people. path: the file that keeps it, by `os.fsencode`, rotated at `limit` bytes (0: never). to: 1 for
    stdout, 2 for stderr, 0 for neither."""

    number: int
    name: str
    path: bytes
    limit: int
    to: int


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The workers are gone, and no stream will be opened any more: pass on what is left."""


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Answer, if you still read."""


class Reading(msgspec.Struct, frozen=True, tag="reading"):
    """The answer to a probe: the drain process reads."""


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """Some output of a stream is not where it would be expected.

    place: "file": it could not be written. "rotated": it was kept, and removed by rotation. "terminal": it was not
    shown. count: bytes of this stream and place so far. unsaid: bytes of these that no line at the terminal tells."""

    name: str
    path: bytes
    place: Literal["file", "rotated", "terminal"]
    count: int
    why: str = ""
    unsaid: int = 0


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """The stream is at its end: nobody can write to it any more."""

    number: int


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """All is passed on that could be. Streams that a process of a worker's still holds are drained further."""


encode = to_msgpack
decode_for_drain = reader(Open | Probe | Finish, "msgpack")
decode_for_agent = reader(Reading | Lost | Closed | Finished, "msgpack")
