"""Is another node still alive?  A counter in the store, and the local time of its last change.

Clocks of two hosts are never compared: each node raises its own counter, and its watcher times the changes on the
watcher's own monotonic clock."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from resilience.core.restart import Add, CompareSet, Protocol, Read, Set

Seconds = float
TOGETHER = 32  # nodes after a silent one that are watched at the same time


class Peer(msgspec.Struct, frozen=True):
    """What is known about another node: its counter and the time of its last observed change.

    has_risen: the counter was seen to change. Before that, the time is that of the first look."""

    node: str
    count: int
    changed_at: Seconds
    has_risen: bool = False


class Liveness(msgspec.Struct, frozen=True):
    """The present state of a peer. `silent_for` is set once it has been silent for longer than allowed."""

    peer: Peer
    silent_for: Seconds | None = None


def weigh(peer: Peer, count: int, now: Seconds, allowed: Seconds) -> Liveness:
    """Return what follows from a look at a peer's counter."""
    if count != peer.count:
        return Liveness(Peer(peer.node, count, now, has_risen=True))
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


class PeerRing(msgspec.Struct, frozen=True):
    """What a node knows of the others: their names, by place, and those that it watches."""

    names: dict[int, str] = {}
    watched: dict[str, Peer] = {}


class SilentNode(msgspec.Struct, frozen=True):
    """A watched node that has been silent for longer than allowed."""

    node: str
    silent_for: Seconds


def look(
    place: int, known: PeerRing, now: Seconds, allowed: Seconds, settled: Collection[str] = ()
) -> Protocol[tuple[PeerRing, tuple[SilentNode, ...]]]:
    """Look at the nodes that the node at `place` watches. Return the new state, and those that are silent.

    It watches the next node of the ring. A silent node watches nobody, so its watcher also watches the node after it.
    Nodes of one rack may be lost together: after a silent node, it also watches the nodes that follow, up to the first
    one whose counter it has seen rise, but at most TOGETHER of them at once. settled: nodes that were silent and need
    no further look."""
    places = yield Add(COUNT_KEY, 0)
    names, watched = dict(known.names), {}
    silent: list[SilentNode] = []
    uncertain = 1  # nodes that may still be watched before it is known whether the last one lives
    for step in range(1, places):
        at = (place - 1 + step) % places + 1
        if at not in names:
            (name,) = yield Read((_name_key(at),))
            if name is None:
                continue  # an empty place, which may be taken later
            names[at] = str(name)
        node = names[at]
        if node in settled:
            uncertain = TOGETHER
            continue
        count = yield Add(beat_key(node), 0)
        liveness = weigh(known.watched.get(node, Peer(node, count, now)), count, now, allowed)
        watched[node] = liveness.peer
        if liveness.silent_for is not None:
            silent.append(SilentNode(node, liveness.silent_for))
            uncertain = TOGETHER
            continue
        uncertain -= 1
        if liveness.peer.has_risen or not uncertain:
            break
    return PeerRing(names, watched), tuple(silent)


def beat_key(node: str) -> str:
    """Return the key of the counter that a node raises."""
    return f"nodes/{node}/beat"


def _place_key(node: str) -> str:
    return f"nodes/{node}/index"


def _name_key(place: int) -> str:
    return f"nodes/name/{place}"


COUNT_KEY = "nodes/count"
