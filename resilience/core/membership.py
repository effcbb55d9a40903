"""Is another node still there?  A counter in the store, and when it last changed *here*.

Clocks of two hosts are never compared: each node raises a counter of its own, and whoever watches it
times the changes on its own monotonic clock."""

from __future__ import annotations

import msgspec

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


def successor(index: int, nodes: int) -> int:
    """Return which node the node at `index` watches: each is watched by exactly one, in a ring.

    index: from 1 to nodes."""
    return index % nodes + 1
