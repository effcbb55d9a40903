"""What do the agents of a job write for each other?  A log of entries, and one formation for each cycle.

An entry has its place by a counter, a formation by its cycle's number. Neither is ever written twice: the second
writer reads what the first has written.

What decides stays: a key for each cycle, with what has changed in its formation since the cycle before. All else goes:
each agent deletes its own entries once the formation that counts them is not the last one any more, and the agent that
forms a cycle deletes the whole formation of the last but one. An agent that stood still for so long finds entries
missing, sees by the cycles' keys that it is behind, and starts from the newest formation."""

from __future__ import annotations

from typing import cast

from resilience.core import gathering
from resilience.core.agent_protocol import Delete, Now, Protocol, Seconds
from resilience.core.gathering import Entry, Formation, Gathering, Nothing
from resilience.core.restart import BLOCK, Add, CompareSet, Read, Set
from resilience.errors import StoreError

HOLE_LIMIT = 2.0  # seconds in which a writer that has its place writes, or is taken to have died


class RendezvousLog:
    """One agent's view of the log and the formations."""

    def __init__(self) -> None:
        self._places: list[int] = []  # of this agent's entries
        self._holes: dict[int, Seconds] = {}  # place -> when this agent first saw that it is empty

    def append(self, entry: Entry) -> Protocol[int]:
        """Write an entry at the end of the log. Return its place."""
        text = gathering.encode(entry)
        while True:
            place = int((yield Add("log/count", 1))) - 1
            if (yield CompareSet(f"log/{place}", text)) == text:
                self._places.append(place)
                return place  # else we were so late that the place was given up

    def read(self, known: Gathering, count: int | None = None) -> Protocol[Gathering]:
        """Take into account what the log holds beyond what is known. count: its entries, if that was just read."""
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
                if later is not None:  # what is missing was deleted
                    return (yield from self.read(gathering.begin((yield from self.newest(known.last)))))
                now = yield Now()
                if now - self._holes.setdefault(place, now) < HOLE_LIMIT:
                    break
                text = yield CompareSet(f"log/{place}", gathering.encode(Nothing()))
            entries.append(gathering.decode_entry(text))
        return gathering.fold(known, entries)

    def next_key(self, known: Gathering) -> str:
        """Return the key of the next entry."""
        return f"log/{known.entries}"

    def following(self, known: Formation) -> Protocol[Formation | None]:
        """Return the formation of the next cycle, or a later one, None if there is none yet. known: that of the cycle
        before, so only what has changed is read."""
        (text,) = yield Read((_cycle_key(known.cycle + 1),))
        if text is None:
            return None
        formation = gathering.changed(known, gathering.decode_change(text))
        return (yield from self._whole(known.cycle + 1)) if formation is None else formation

    def newest(self, known: Formation) -> Protocol[Formation]:
        """Return the last formation; `known` is one that was read before."""
        if known.cycle == gathering.FIRST:
            (text,) = yield Read(("newest",))
            known = known if text is None else (yield from self._whole(int(text)))
        while not known.closed:
            following = yield from self.following(known)
            if following is None:
                break
            known = following
        return known

    def _whole(self, cycle: int) -> Protocol[Formation]:
        """Return a cycle's formation, or that of a later one if it is deleted."""
        while True:
            (text,) = yield Read((_cycle_key(cycle),))
            if text is None:
                raise StoreError(f"the formation of cycle {cycle} is missing in the job's store; start the job anew")
            change = gathering.decode_change(text)
            if change.closed:
                return cast(Formation, gathering.changed(Formation(), change))
            (text,) = yield Read((_formation_key(cycle, change.by),))
            if text is not None:
                return gathering.decode_formation(text)
            cycle += 1  # it was deleted, for there are later ones

    def write(self, last: Formation, formation: Formation) -> Protocol[Formation]:
        """Write a formation unless its cycle has one. Return the cycle's, or a later one. last: that of the cycle
        before."""
        own = _formation_key(formation.cycle, formation.by)
        if not formation.closed:
            yield Set(own, gathering.encode(formation))  # before it stands: whoever sees that it does can read it
        text = gathering.encode(gathering.difference(last, formation))
        standing = yield CompareSet(_cycle_key(formation.cycle), text)
        if standing == text:
            yield Set("newest", str(formation.cycle))  # may lag behind, never points at nothing
            if last.before:  # that of the last cycle may be just being read
                yield Delete(_formation_key(last.cycle - 1, last.before))
            return formation
        if gathering.decode_change(standing).by != formation.by:
            yield Delete(own)
        return cast(Formation, (yield from self.following(last)))

    def forget(self, below: int) -> Protocol[None]:
        """Delete what this agent has written into the log before a place. No agent that reads from there on needs
        it."""
        old = [place for place in self._places if place < below]
        self._places = [place for place in self._places if place >= below]
        for place in old:
            yield Delete(f"log/{place}")


def _cycle_key(cycle: int) -> str:
    """Return the key that says what a cycle's formation is. It is never deleted: it decides."""
    return f"cycle/{cycle}"


def _formation_key(cycle: int, by: str) -> str:
    """Return the key of a whole formation, for those who do not know the one before."""
    return f"formation/{cycle}/{by}"
