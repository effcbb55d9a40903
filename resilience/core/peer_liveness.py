"""Is another node still alive?  A counter in the store, and the local time of its last change.

Clocks of two hosts are never compared: each node raises its own counter, and its watcher times the changes on the
watcher's own monotonic clock."""

from __future__ import annotations

import msgspec

from resilience.core.restart import Add, CompareSet, Protocol, Read, Set

Seconds = float


class Peer(msgspec.Struct, frozen=True):
    """What is known about another node: its counter and the time of its last observed change."""

    node: str
    count: int
    changed_at: Seconds


class Liveness(msgspec.Struct, frozen=True):
    """The present state of a peer. `silent_for` is set once it has been silent for longer than allowed."""

    peer: Peer
    silent_for: Seconds | None = None


def weigh(peer: Peer, count: int, now: Seconds, allowed: Seconds) -> Liveness:
    """Return what follows from a look at a peer's counter."""
    if count != peer.count:
        return Liveness(Peer(peer.node, count, now))
    silent_for = now - peer.changed_at
    return Liveness(peer, silent_for if silent_for >= allowed else None)


def take_place(node: str) -> Protocol[int]:
    """Assign a node its place in the ring and return it, from 1. All callers for one node get the same place.

    The processes of a node may ask at the same time, and each may die between any two operations. A place that was
    counted but not used stays empty."""
    (place,) = yield Read((_place_key(node),))
    if place is None:
        free = yield Add(COUNT_KEY, 1)
        place = yield CompareSet(_place_key(node), str(free))
    yield Set(_name_key(int(place)), node)  # also in place of a process that died before it could
    return int(place)


class Neighbour(msgspec.Struct, frozen=True):
    """The next node of the ring, "" if there is no other one.

    places: of the ring when it was read; 0 if an empty place was skipped, which may be taken later."""

    node: str = ""
    places: int = 0


def next_node(place: int, known: Neighbour | None = None) -> Protocol[Neighbour]:
    """Return the node that the node at `place` watches: the next one in the ring, so each node has exactly one watcher.

    known: what an earlier call returned. Names are read again only if the ring may have changed."""
    places = yield Add(COUNT_KEY, 0)
    if known is not None and places == known.places:
        return known
    for step in range(1, places):
        (name,) = yield Read((_name_key((place - 1 + step) % places + 1),))
        if name is not None:
            return Neighbour(str(name), places if step == 1 else 0)
    return Neighbour("", places if places == 1 else 0)


def _place_key(node: str) -> str:
    return f"nodes/{node}/index"


def _name_key(place: int) -> str:
    return f"nodes/name/{place}"


COUNT_KEY = "nodes/count"
