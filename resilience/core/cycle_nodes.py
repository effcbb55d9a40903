"""What do a cycle's agents know about each other's nodes?  Counts in the job's store.

The cost does not depend on the number of nodes. Each agent notes when a worker of its node fails, and when no worker is
left. The rendezvous knows the lost agents; an agent that notices a loss stands in for that node. A barrier
(`core.restart.arrive`) detects that no worker runs any more: the agent that completes it learns this. One counter holds
everything else, so no agent has to read the notes of every other agent. `core.control` decides what follows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, cast

from resilience.core.agent_protocol import Delete, Protocol, T
from resilience.core.control import Nodes
from resilience.core.restart import Add, Read, Set, arrive

Fact = Literal["failed", "ended"]
WELL = 1 << 32  # in the counter: one node whose workers all succeeded; the lower bits count nodes that failed


class CycleNodes:
    """One agent's view of a cycle's nodes. `open` comes first."""

    def __init__(self, cycle: int, nodes: Iterable[str], own: str, name: str = "job/nodes") -> None:
        """nodes: names of all nodes, in the same order on every agent; own: the name of this node; name: beginning of
        the keys."""
        self._key = f"{name}/{cycle}"
        self._ranks = {node: rank for rank, node in enumerate(nodes)}
        self._own = own
        self._noted: set[Fact] = set()
        self._lost: frozenset[str] = frozenset()
        self._is_over = False  # no worker runs any more
        self._count = 0
        self._written: list[str] = []  # keys that this agent wrote
        self._nodes = Nodes(len(self._ranks))

    def open(self) -> Protocol[None]:
        """Create the counter."""
        yield Add(self._key, 0)

    def note(self, fact: Fact) -> Protocol[bool]:
        """Publish a fact about this node. Return True if it is new."""
        if fact in self._noted:
            return False
        self._noted.add(fact)
        if fact == "failed":
            yield from self._add("failed", 1)
            return True
        if "failed" not in self._noted:
            yield from self._add("well", WELL)
        yield from self._arrive(self._own)
        return True

    @property
    def is_waiting(self) -> bool:
        """Return True if all workers of this node succeeded."""
        return "ended" in self._noted and "failed" not in self._noted

    @property
    def key(self) -> str:
        """Return the key of the counter."""
        return self._key

    def look(self, lost: Iterable[str], count: int) -> Protocol[Nodes]:
        """Return what is known now. lost: nodes that the rendezvous knows to be lost; count: the counter, read at the
        same time or later. If nothing has changed, this costs no operation."""
        was_over = self._is_over  # before this call, which may not know another lost node yet
        for node in sorted(self._ranks.keys() & frozenset(lost) - self._lost):
            yield from self._arrive(node)
            self._lost |= {node}
        if (count, self._lost, was_over) != (self._count, self._nodes.lost, self._nodes.is_over):
            self._count = count
            self._nodes = yield from self._weighed(count, was_over)
        return self._nodes

    def _weighed(self, count: int, is_over: bool) -> Protocol[Nodes]:
        """Return what a count says. A node that noted a fact and then was lost is not counted twice.

        There is one exception: an agent that dies between its two operations is counted twice. This may restart a cycle
        that could have continued, but never continues one that could not."""
        names = [f"{self._key}/{fact}/{node}" for node in self._lost for fact in ("failed", "well")] if count else []
        values = yield Read(tuple(names))
        failed, well = (sum(value is not None for value in values[first::2]) for first in (0, 1))
        return Nodes(
            all=len(self._ranks),
            unhealthy=min(len(self._ranks), max(0, count % WELL - failed) + len(self._lost)),
            waiting=max(0, count // WELL - well),
            lost=self._lost,
            is_over=is_over,
        )

    def forget(self) -> Protocol[None]:
        """Delete the keys of this agent except the counter. The cycle is over, because there is a later one."""
        for key in self._written:
            yield Delete(key)

    def _add(self, name: str, amount: int) -> Protocol[None]:
        yield Add(self._key, amount)
        yield from self._noting(_set(f"{self._key}/{name}/{self._own}"))

    def _arrive(self, node: str) -> Protocol[None]:
        is_last = yield from self._noting(arrive(f"{self._key}/ended", self._ranks[node], len(self._ranks)))
        self._is_over |= bool(is_last)

    def _noting(self, protocol: Protocol[T]) -> Protocol[T]:
        """Run a protocol and note the keys that it writes."""
        result = None
        while True:
            try:
                operation = protocol.send(result)
            except StopIteration as stop:
                return cast(T, stop.value)
            if isinstance(operation, Set):
                self._written.append(operation.key)
            result = yield operation


def _set(key: str) -> Protocol[None]:
    yield Set(key, "1")
