"""Is another node still there?  A counter in the store, and when it last changed *here*.

Clocks of two hosts are never compared: each node raises a counter of its own, and whoever watches it
times the changes on its own monotonic clock."""

from __future__ import annotations

import msgspec

from resilience.core.restart import Add, CompareSet, Protocol, Read, Set

Seconds = float


class Peer(msgspec.Struct, frozen=True):
    """What is known of another node: its counter and when that was last seen to change."""

    node: str
    count: int
    changed_at: Seconds


class Verdict(msgspec.Struct, frozen=True):
    """The peer as known now; `silent_for` is set once it has been silent for longer than allowed."""

    peer: Peer
    silent_for: Seconds | None = None


def weigh(peer: Peer, count: int, now: Seconds, allowed: Seconds) -> Verdict:
    """Return what a look at a peer's counter tells."""
    if count != peer.count:
        return Verdict(Peer(peer.node, count, now))
    silent_for = now - peer.changed_at
    return Verdict(peer, silent_for if silent_for >= allowed else None)


def take_place(node: str) -> Protocol[int]:
    """Give a node its place in the ring and return it, from 1. All who ask for the same node get the same place.

    The processes of a node may ask at the same time, and each of them may die between any two operations. A place
    that was counted and not used stays empty."""
    (place,) = yield Read((_place_key(node),))
    if place is None:
        free = yield Add(COUNT_KEY, 1)
        place = yield CompareSet(_place_key(node), str(free))
    yield Set(_name_key(int(place)), node)  # also for one that died before it could
    return int(place)


def next_node(place: int) -> Protocol[str]:
    """Return the node that the one at `place` watches: the next one in the ring, so each is watched by exactly one.

    Empty places are passed over. Returns "" if there is no other node."""
    places = yield Add(COUNT_KEY, 0)
    for step in range(1, places):
        (name,) = yield Read((_name_key((place - 1 + step) % places + 1),))
        if name is not None:
            return str(name)
    return ""


def _place_key(node: str) -> str:
    return f"nodes/{node}/index"


def _name_key(place: int) -> str:
    return f"nodes/name/{place}"


COUNT_KEY = "nodes/count"
