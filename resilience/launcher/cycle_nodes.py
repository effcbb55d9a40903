"""What do a cycle's agents know of each other's nodes?  Counts in the job's store, which cost the same for any number.

Each agent notes when a worker of its node ends badly, and when none is left; who is lost the rendezvous knows, and
whoever notices it stands in for such a node. That nobody runs any more is a barrier (`core.restart.arrive`): whoever
completes it knows. All else is one counter: nobody reads what each of the others has told. What follows from it is
`core.control`'s."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from resilience.adapters.store import StoreLike, drive, execute
from resilience.core.control import Nodes
from resilience.core.restart import Add, Read, Set, arrive

Fact = Literal["failed", "ended"]
WELL = 1 << 32  # in the counter: nodes that are through, and well, above those that failed


class CycleNodes:
    """One agent's view of a cycle's nodes. Main thread only. Methods raise StoreError."""

    def __init__(self, store: StoreLike, cycle: int, nodes: Iterable[str], own: str) -> None:
        """store: of the job; nodes: names of all, in the order that all know them in, own: that of this one."""
        self._store = store
        self._key = f"nodes/{cycle}"
        self._ranks = {node: rank for rank, node in enumerate(nodes)}
        self._own = own
        self._noted: set[Fact] = set()
        self._lost: frozenset[str] = frozenset()
        self._is_over = False  # nobody runs any more
        self._count = 0
        self._seen = Nodes(len(self._ranks))
        execute(Add(self._key, 0), store)  # it is there from now on

    def note(self, fact: Fact) -> bool:
        """Tell all what became true of this node; answers whether that is new."""
        if fact in self._noted:
            return False
        self._noted.add(fact)
        if fact == "failed":
            self._add("failed", 1)
            return True
        if "failed" not in self._noted:
            self._add("well", WELL)
        self._arrive(self._own)
        return True

    @property
    def is_waiting(self) -> bool:
        """Whether this node is through, and well."""
        return "ended" in self._noted and "failed" not in self._noted

    @property
    def key(self) -> str:
        """Where the counter is."""
        return self._key

    def look(self, lost: Iterable[str], count: int) -> Nodes:
        """Return what is known now. lost: nodes that the rendezvous knows to be lost; count: the counter, read at
        the same time or later. No operation where nothing has changed."""
        was_over = self._is_over  # if it is only now, somebody else may be known to be lost who was stood in for
        for node in self._ranks.keys() & frozenset(lost) - self._lost:
            self._arrive(node)
            self._lost |= {node}
        if (count, self._lost, was_over) != (self._count, self._seen.lost, self._seen.is_over):
            self._count = count
            self._seen = self._weighed(count, was_over)
        return self._seen

    def _weighed(self, count: int, is_over: bool) -> Nodes:
        """What a count says, without counting twice who told something and then was lost.

        An agent that dies between its two operations is: then one node more than there are is taken for unhealthy,
        which may restart a cycle that could have gone on, and never lets one go on that could not."""
        of_lost = [f"{self._key}/{fact}/{node}" for node in self._lost for fact in ("failed", "well")] if count else []
        told = execute(Read(tuple(of_lost)), self._store)
        failed, well = (sum(each is not None for each in told[which::2]) for which in (0, 1))
        return Nodes(
            all=len(self._ranks),
            unhealthy=min(len(self._ranks), max(0, count % WELL - failed) + len(self._lost)),
            waiting=max(0, count // WELL - well),
            lost=self._lost,
            is_over=is_over,
        )

    def _add(self, name: str, amount: int) -> None:
        execute(Add(self._key, amount), self._store)
        execute(Set(f"{self._key}/{name}/{self._own}", "1"), self._store)

    def _arrive(self, node: str) -> None:
        name = f"{self._key}/ended"
        self._is_over |= drive(arrive(name, self._ranks[node], len(self._ranks)), self._store)
