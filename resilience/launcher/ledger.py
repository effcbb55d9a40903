"""What do the agents of a job write down for each other?  A log of entries, and one formation a cycle.

An entry has its place by a counter, a formation by its cycle's number, and neither is ever written twice:
who comes second reads what the first has written. Nothing is deleted: a cycle leaves an entry of some
hundred bytes a node, and a formation with as much for each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from resilience.adapters.store import StoreLike, execute
from resilience.core import gathering
from resilience.core.gathering import Entry, Formation, Gathering, Nothing
from resilience.core.restart import Add, CompareSet, Operation, Read, Set
from resilience.errors import StoreError

HOLE_LIMIT = 2.0  # seconds in which a writer that has its place writes, or is taken to have died


class Ledger:
    """The log and the formations in a store. Every method raises StoreError if the store does not answer."""

    def __init__(self, store: StoreLike, why_not: Callable[[], str] = lambda: "") -> None:
        """why_not: asked before each operation; why this agent has no say any more, empty if it has."""
        self._store = store
        self._why_not = why_not
        self._holes: dict[int, float] = {}  # place -> since when we know of it

    def do(self, operation: Operation) -> Any:
        """Perform one operation on the store."""
        if why_not := self._why_not():
            raise StoreError(f"the job's store is out of reach: {why_not}")
        return execute(operation, self._store)

    def append(self, entry: Entry) -> None:
        """Write an entry at the end of the log."""
        text = gathering.encode(entry)
        while True:
            place = self.do(Add("log/count", 1)) - 1
            if self.do(CompareSet(f"log/{place}", text)) == text:
                return  # else we were so late that the place was given up

    def read(self, known: Gathering, count: int | None = None) -> Gathering:
        """Take into account what the log holds beyond what is known. count: its entries, if that was just read."""
        if count is None:
            count = int(self.do(Add("log/count", 0)))
        entries = []
        for place in range(known.entries, count):
            (text,) = self.do(Read((f"log/{place}",)))
            if text is None:
                if time.monotonic() - self._holes.setdefault(place, time.monotonic()) < HOLE_LIMIT:
                    break
                text = self.do(CompareSet(f"log/{place}", gathering.encode(Nothing())))
            self._holes.pop(place, None)
            entries.append(gathering.decode_entry(text))
        return gathering.fold(known, entries) if entries else known

    def formation(self, cycle: int) -> Formation | None:
        """Return a cycle's formation, None if there is none yet."""
        (text,) = self.do(Read((f"cycle/{cycle}",)))
        return None if text is None else gathering.decode_formation(text)

    def newest(self, known: Formation) -> Formation:
        """Return the last formation; `known` is one that was read before."""
        if known.cycle == gathering.FIRST:
            (text,) = self.do(Read(("newest",)))
            known = known if text is None else cast(Formation, self.formation(int(text)))
        while not known.closed:
            following = self.formation(known.cycle + 1)
            if following is None:
                break
            known = following
        return known

    def write(self, formation: Formation) -> Formation:
        """Write a formation unless its cycle has one; answers the cycle's."""
        text = gathering.encode(formation)
        standing = self.do(CompareSet(f"cycle/{formation.cycle}", text))
        if standing == text:
            self.do(Set("newest", str(formation.cycle)))  # may lag behind, never points at nothing
        return gathering.decode_formation(standing)
