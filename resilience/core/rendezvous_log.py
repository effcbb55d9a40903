"""What do the agents of a job write for each other?  A log of entries, and one membership for each cycle.

A counter gives an entry its place; the cycle number gives a membership its place. Neither is ever written twice: the
second writer reads what the first has written.

One key per cycle stays, with the changes of its membership since the previous cycle. Everything else is deleted. Each
agent deletes its own entries once there is a later membership than the one that includes them. The agent that forms a
cycle deletes the whole membership of the last cycle but one. An agent that was stopped for that long finds entries
missing, learns from the cycles' keys that it is behind, and starts from the newest membership."""

from __future__ import annotations

import math
from typing import cast

from resilience.core import membership
from resilience.core.agent_protocol import Delete, Protocol, ReadClock, Seconds
from resilience.core.membership import Arrivals, Entry, Membership, Nothing
from resilience.core.restart import BLOCK, Add, CompareSet, Read, Set
from resilience.errors import StoreError

HOLE_LIMIT = 2.0  # seconds in which a writer must fill its place; then it counts as dead


class RendezvousLog:
    """One agent's view of the log and the memberships."""

    def __init__(self) -> None:
        self._places: list[int] = []  # places of this agent's entries
        self._holes: dict[int, Seconds] = {}  # empty place -> when this agent first found it

    def append(self, entry: Entry, until: Seconds = math.inf) -> Protocol[int]:
        """Write an entry at the end of the log. Return its place. until: the time after which the entry may no longer
        be true, because this agent stood still or the store was slow; then its place stays empty."""
        text = membership.encode(entry)
        while True:
            place = int((yield Add("log/count", 1))) - 1
            if (yield ReadClock()) > until:
                text = membership.encode(Nothing())
            if (yield CompareSet(f"log/{place}", text)) == text:
                self._places.append(place)
                return place  # otherwise this agent was too late, and the place was given up

    def read(self, known: Arrivals, count: int | None = None) -> Protocol[Arrivals]:
        """Return the arrivals after the new entries of the log. count: number of entries, if it was just read."""
        if count is None:
            count = int((yield Add("log/count", 0)))
        keys = [f"log/{place}" for place in range(known.entries, count)]
        texts: list[str | None] = []
        for first in range(0, len(keys), BLOCK):
            texts += yield Read(tuple(keys[first : first + BLOCK]))
        entries = []
        for place, text in enumerate(texts, known.entries):
            if text is None:
                (later,) = yield Read((_cycle_key(known.last.cycle + 2),))
                if later is not None:  # the missing entries were deleted
                    newest = yield from self.newest(known.last)
                    if newest.closed:  # the end has no nodes
                        newest = yield from self.before(newest)
                    return (yield from self.read(membership.begin(newest)))
                now = yield ReadClock()
                if now - self._holes.setdefault(place, now) < HOLE_LIMIT:
                    break
                text = yield CompareSet(f"log/{place}", membership.encode(Nothing()))
            entries.append(membership.decode_entry(text))
        return membership.fold(known, entries)

    def next_key(self, known: Arrivals) -> str:
        """Return the key of the next entry."""
        return f"log/{known.entries}"

    def following(self, known: Membership) -> Protocol[Membership | None]:
        """Return the membership of the next cycle, or a later one, None if there is none yet. known: the previous
        membership, so only the changes are read."""
        (text,) = yield Read((_cycle_key(known.cycle + 1),))
        if text is None:
            return None
        next_membership = membership.changed(known, membership.decode_change(text))
        return (yield from self._whole(known.cycle + 1)) if next_membership is None else next_membership

    def newest(self, known: Membership) -> Protocol[Membership]:
        """Return the last membership. known: any membership that was read before."""
        if known.cycle == membership.FIRST:
            (text,) = yield Read(("newest",))
            known = known if text is None else (yield from self._whole(int(text)))
        while not known.closed:
            following = yield from self.following(known)
            if following is None:
                break
            known = following
        return known

    def before(self, end: Membership) -> Protocol[Membership]:
        """Return the last membership before the rendezvous was closed, the end itself if there was none."""
        (text,) = yield Read((_membership_key(end.cycle - 1, end.before),))
        return end if text is None else membership.decode_membership(text)

    def _whole(self, cycle: int) -> Protocol[Membership]:
        """Return a cycle's membership, or a later one if it was deleted."""
        while True:
            (text,) = yield Read((_cycle_key(cycle),))
            if text is None:
                raise StoreError(f"the membership of cycle {cycle} is missing in the job's store; restart the job")
            change = membership.decode_change(text)
            if change.closed:
                return cast(Membership, membership.changed(Membership(), change))
            (text,) = yield Read((_membership_key(cycle, change.by),))
            if text is not None:
                return membership.decode_membership(text)
            cycle += 1  # it was deleted because there are later ones

    def write(self, last: Membership, next_membership: Membership) -> Protocol[Membership]:
        """Write a membership unless its cycle has one. Return the cycle's membership, or a later one. last: that of the
        previous cycle."""
        own = _membership_key(next_membership.cycle, next_membership.by)
        if not next_membership.closed:
            yield Set(own, membership.encode(next_membership))  # written before the cycle's key, so all can read it
        text = membership.encode(membership.difference(last, next_membership))
        standing = yield CompareSet(_cycle_key(next_membership.cycle), text)
        if standing == text:
            yield Set("newest", str(next_membership.cycle))  # may lag behind, but always names an existing cycle
            if last.before:  # another agent may be reading the last cycle's membership
                yield Delete(_membership_key(last.cycle - 1, last.before))
            return next_membership
        if membership.decode_change(standing).by != next_membership.by:
            yield Delete(own)
        return cast(Membership, (yield from self.following(last)))

    def forget(self, below: int) -> Protocol[None]:
        """Delete this agent's log entries before a place. Agents that read from there on do not need them."""
        obsolete = [place for place in self._places if place < below]
        self._places = [place for place in self._places if place >= below]
        for place in obsolete:
            yield Delete(f"log/{place}")


def _cycle_key(cycle: int) -> str:
    """Return the key that decides a cycle's membership. It is never deleted."""
    return f"cycle/{cycle}"


def _membership_key(cycle: int, by: str) -> str:
    """Return the key of a whole membership, for agents that do not know the previous one."""
    return f"membership/{cycle}/{by}"
