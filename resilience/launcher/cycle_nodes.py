"""What do a cycle's agents know of each other's nodes?  One short list a cycle, in the job's store.

Each agent notes when a worker of its node ends badly, and when none is left; who is lost the rendezvous
knows. What that calls for is `core.control`'s."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from resilience.adapters.store import StoreLike
from resilience.core.control import Nodes
from resilience.launcher.shared_list import SharedList

Fact = Literal["failed", "ended"]


class CycleNodes:
    """One agent's view of a cycle's nodes. Main thread only. Methods raise StoreError."""

    def __init__(self, store: StoreLike, cycle: int, nodes: Iterable[str], own: str) -> None:
        """store: of the job; nodes: names of all, own: that of this one."""
        self._list = SharedList(store, f"nodes/{cycle}")
        self._all = frozenset(nodes)
        self._own = own
        self._facts: dict[str, set[str]] = {"failed": set(), "ended": set()}

    def note(self, fact: Fact) -> None:
        """Tell all what became true of this node, once."""
        self._list.append(f"{fact} {self._own}", lambda: self._own in self._known()[fact])

    def look(self, lost: Iterable[str] = ()) -> Nodes:
        """Return what is known now. lost: nodes that the rendezvous knows to be lost."""
        known = self._known()
        return Nodes(self._all, frozenset(known["ended"]), frozenset(known["failed"]), frozenset(lost) & self._all)

    def _known(self) -> dict[str, set[str]]:
        for text in self._list.read():
            fact, _, node = text.partition(" ")
            self._facts.setdefault(fact, set()).add(node)
        return self._facts
