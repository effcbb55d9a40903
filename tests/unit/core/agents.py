"""Agents of a job on a store in memory, under a virtual clock: one protocol at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilience.core import agent_liveness
from resilience.core.agent_protocol import (
    AwaitKey,
    Counts,
    Delete,
    Emit,
    HighestStep,
    IsInterrupted,
    Protocol,
    ReadClock,
    Sleep,
)
from resilience.core.membership import Entry, NodeSeat, decode_entry
from resilience.core.rendezvous import Rendezvous
from resilience.core.rendezvous_log import RendezvousLog
from resilience.core.restart import Add
from resilience.core.terms import Terms
from resilience.facts.events import Event
from tests.restart_simulation.store import MemoryStore

MOST = 50_000  # operations of one protocol
TERMS = Terms(least=2, most=2, join_limit=1000.0)


class Run:
    """Runs protocols. Agents that `counts` was called for count before each operation.

    is_told: keys that are waited for are heard of; interrupted_at: then the agent is told to stop waiting; before:
    called with each operation on the store before it is performed, but for those that it performs itself."""

    def __init__(self, is_told: bool = True) -> None:
        self.store = MemoryStore()
        self.now = 0.0
        self.operations = 0
        self.interrupted_at = float("inf")
        self.before: Callable[[Any], None] = lambda operation: None
        self.emitted: list[Event] = []
        self._is_told = is_told
        self._is_before = False
        self._counting: list[str] = []
        for name in ("log/count", "notices"):
            self.store.perform(Add(name, 0))

    def counts(self, id: str) -> None:
        self.store.perform(Add(agent_liveness.key(id), 1))
        self._counting.append(agent_liveness.key(id))

    def falls_silent(self, id: str) -> None:
        self._counting.remove(agent_liveness.key(id))

    def run(self, protocol: Protocol[Any]) -> Any:
        answer: Any = None
        try:
            for _ in range(MOST):
                answer = self.perform(protocol.send(answer))
        except StopIteration as stop:
            return stop.value
        raise AssertionError(f"the protocol has not ended after {MOST} operations")

    def perform(self, operation: Any) -> Any:
        match operation:
            case ReadClock():
                return self.now
            case Sleep(seconds):
                self.now += seconds
                return None
            case IsInterrupted():
                return self.now >= self.interrupted_at
            case AwaitKey(key, limit):
                is_there = self._is_told and key in self.store.data
                self.now += 0.0 if is_there else limit
                return is_there
            case Emit(event):
                self.emitted.append(event)
                return None
            case HighestStep():
                return -1
        self.operations += 1
        if not self._is_before:
            self._is_before = True
            self.before(operation)
            self._is_before = False
        for key in self._counting:
            self.store.perform(Add(key, 1))
        match operation:
            case Counts(keys):
                return [int(self.store.data[key]) for key in keys]
            case Delete(key):
                return self.store.data.pop(key, None)
        return self.store.perform(operation)

    # -- what other agents do -----------------------------------------------------------------------

    def writes(self, *entries: Entry) -> None:
        """Other agents write into the log."""
        for entry in entries:
            self.run(RendezvousLog().append(entry))

    def log(self) -> list[Entry]:
        """Return what the log holds."""
        places = range(int(self.store.data["log/count"]))
        return [decode_entry(self.store.data[f"log/{place}"]) for place in places if f"log/{place}" in self.store.data]

    def keys(self, beginning: str) -> list[str]:
        return sorted(key for key in self.store.data if key.startswith(beginning))


def seat(id: str) -> NodeSeat:
    return NodeSeat(id, id, "here", 1)


def agent(run: Run, id: str, terms: Terms = TERMS) -> Rendezvous:
    run.counts(id)
    return Rendezvous(id, id, terms)
