"""What do the agents of a job write for each other?  A log of entries, and one formation for each cycle.

An entry has its place by a counter, a formation by its cycle's number. Neither is ever written twice: the second
writer reads what the first has written. Nothing is deleted: a cycle leaves an entry of some hundred bytes for each
node, and a formation with as much for each."""

from __future__ import annotations

from typing import cast

from resilience.core import gathering
from resilience.core.agent_protocol import Now, Protocol, Seconds
from resilience.core.gathering import Entry, Formation, Gathering, Nothing
from resilience.core.restart import BLOCK, Add, CompareSet, Read, Set

HOLE_LIMIT = 2.0  # seconds in which a writer that has its place writes, or is taken to have died


class RendezvousLog:
    """One agent's view of the log and the formations."""

    def __init__(self) -> None:
        self._holes: dict[int, Seconds] = {}  # place -> when this agent first saw that it is empty

    def append(self, entry: Entry) -> Protocol[None]:
        """Write an entry at the end of the log."""
        text = gathering.encode(entry)
        while True:
            place = (yield Add("log/count", 1)) - 1
            if (yield CompareSet(f"log/{place}", text)) == text:
                return  # else we were so late that the place was given up

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
                now = yield Now()
                if now - self._holes.setdefault(place, now) < HOLE_LIMIT:
                    break
                text = yield CompareSet(f"log/{place}", gathering.encode(Nothing()))
            self._holes.pop(place, None)
            entries.append(gathering.decode_entry(text))
        return gathering.fold(known, entries) if entries else known

    def next_key(self, known: Gathering) -> str:
        """Return the key of the next entry."""
        return f"log/{known.entries}"

    def formation(self, cycle: int) -> Protocol[Formation | None]:
        """Return a cycle's formation, None if there is none yet."""
        (text,) = yield Read((f"cycle/{cycle}",))
        return None if text is None else gathering.decode_formation(text)

    def newest(self, known: Formation) -> Protocol[Formation]:
        """Return the last formation; `known` is one that was read before."""
        if known.cycle == gathering.FIRST:
            (text,) = yield Read(("newest",))
            known = known if text is None else cast(Formation, (yield from self.formation(int(text))))
        while not known.closed:
            following = yield from self.formation(known.cycle + 1)
            if following is None:
                break
            known = following
        return known

    def write(self, formation: Formation) -> Protocol[Formation]:
        """Write a formation unless its cycle has one. Return the cycle's."""
        text = gathering.encode(formation)
        standing = yield CompareSet(f"cycle/{formation.cycle}", text)
        if standing == text:
            yield Set("newest", str(formation.cycle))  # may lag behind, never points at nothing
        return gathering.decode_formation(standing)
