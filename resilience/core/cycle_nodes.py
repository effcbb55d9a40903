"""What do a cycle's agents know of each other's nodes?  Counts in the job's store, which cost the same for any number.

Each agent notes when a worker of its node ends badly, and when none is left. Lost agents are known to the rendezvous,
and an agent that notices a loss stands in for that node. That nobody runs any more is a barrier
(`core.restart.arrive`): the agent that completes it knows. All else is one counter, so no agent reads what each of the
others has noted. What follows from it is `core.control`'s."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, cast

from resilience.core.agent_protocol import Delete, Protocol, T
from resilience.core.control import Nodes
from resilience.core.restart import Add, Read, Set, arrive

Fact = Literal["failed", "ended"]
WELL = 1 << 32  # in the counter: nodes that are through, and well, above those that failed


class CycleNodes:
    """One agent's view of a cycle's nodes. `open` comes first."""

    def __init__(self, cycle: int, nodes: Iterable[str], own: str, name: str = "job/nodes") -> None:
        """nodes: names of all, in the order that all agents know them in; own: that of this one; name: beginning of
        the keys."""
        self._key = f"{name}/{cycle}"
        self._ranks = {node: rank for rank, node in enumerate(nodes)}
        self._own = own
        self._noted: set[Fact] = set()
        self._lost: frozenset[str] = frozenset()
        self._is_over = False  # nobody runs any more
        self._count = 0
        self._written: list[str] = []  # keys of this agent
        self._nodes = Nodes(len(self._ranks))

    def open(self) -> Protocol[None]:
        """Make the counter: it is there from now on."""
        yield Add(self._key, 0)

    def note(self, fact: Fact) -> Protocol[bool]:
        """Tell all what became true of this node. Return True if that is new."""
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
        """Whether this node is through, and well."""
        return "ended" in self._noted and "failed" not in self._noted

    @property
    def key(self) -> str:
        """Where the counter is."""
        return self._key

    def look(self, lost: Iterable[str], count: int) -> Protocol[Nodes]:
        """Return what is known now. lost: nodes that the rendezvous knows to be lost; count: the counter, read at
        the same time or later. No operation where nothing has changed."""
        was_over = self._is_over  # if it is only now, another node may be known to be lost that was stood in for
        for node in sorted(self._ranks.keys() & frozenset(lost) - self._lost):
            yield from self._arrive(node)
            self._lost |= {node}
        if (count, self._lost, was_over) != (self._count, self._nodes.lost, self._nodes.is_over):
            self._count = count
            self._nodes = yield from self._weighed(count, was_over)
        return self._nodes

    def _weighed(self, count: int, is_over: bool) -> Protocol[Nodes]:
        """What a count says, without counting a node twice that noted something and then was lost.

        An agent that dies between its two operations is: then one node more than there are is taken for unhealthy,
        which may restart a cycle that could have gone on, and never lets one go on that could not."""
        names = [f"{self._key}/{fact}/{node}" for node in self._lost for fact in ("failed", "well")] if count else []
        values = yield Read(tuple(names))
        failed, well = (sum(each is not None for each in values[which::2]) for which in (0, 1))
        return Nodes(
            all=len(self._ranks),
            unhealthy=min(len(self._ranks), max(0, count % WELL - failed) + len(self._lost)),
            waiting=max(0, count // WELL - well),
            lost=self._lost,
            is_over=is_over,
        )

    def forget(self) -> Protocol[None]:
        """Delete what this agent has written, all but the counter: the cycle is over, for there is a later one."""
        for key in self._written:
            yield Delete(key)

    def _add(self, name: str, amount: int) -> Protocol[None]:
        yield Add(self._key, amount)
        yield from self._noting(_set(f"{self._key}/{name}/{self._own}"))

    def _arrive(self, node: str) -> Protocol[None]:
        is_last = yield from self._noting(arrive(f"{self._key}/ended", self._ranks[node], len(self._ranks)))
        self._is_over |= bool(is_last)

    def _noting(self, protocol: Protocol[T]) -> Protocol[T]:
        """Run a protocol, and note the keys that it writes."""
        answer = None
        while True:
            try:
                operation = protocol.send(answer)
            except StopIteration as stop:
                return cast(T, stop.value)
            if isinstance(operation, Set):
                self._written.append(operation.key)
            answer = yield operation


def _set(key: str) -> Protocol[None]:
    yield Set(key, "1")
