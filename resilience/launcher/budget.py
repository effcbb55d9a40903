"""The job's failures, in its store: one list that all agents read and whoever's verdict stands appends to.

What a failure brings about is decided by `core.budget`. An agent that dies between taking a number and
writing under it leaves a gap, which counts as a restart and as no repetition of anything."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from resilience.core import budget
from resilience.core.attribution import InterruptionRecord
from resilience.core.budget import Answer, Budget, Failure


class JobBudget:
    """One agent's view of the job's budget. Main thread only."""

    def __init__(self, store: Any, allowed: Budget) -> None:
        """store: of the job, outliving cycles."""
        self._store = store
        self._allowed = allowed
        self._seen: dict[int, Failure] = {}

    @property
    def used(self) -> int:
        """How many restarts the job has used."""
        return int(self._store.add("failures", 0))

    def history(self) -> list[Failure]:
        """Return all failures, oldest first, timed by when this agent first saw them."""
        for number in range(self.used):
            if number not in self._seen:
                self._seen[number] = self._read(number)
        return [self._seen[number] for number in sorted(self._seen)]

    def decide(self, failure: Failure) -> Answer:
        """Return what follows from a failure. Nothing is spent yet."""
        return budget.decide(self._allowed, self.history(), msgspec.structs.replace(failure, at=time.monotonic()))

    def spend(self, failure: Failure) -> None:
        """Note a failure that is followed by a restart."""
        number = int(self._store.add("failures", 1)) - 1
        self._store.set(f"failure/{number}", msgspec.json.encode(failure).decode())

    def _read(self, number: int) -> Failure:
        key = f"failure/{number}"
        if not self._store.check([key]):
            return Failure(-1, f"unknown {number}", "not told", "?", -1, -1, time.monotonic())
        read = msgspec.json.decode(self._store.get(key), type=Failure)
        return msgspec.structs.replace(read, at=time.monotonic())


def failure_of(record: InterruptionRecord, cycle: int, node: str, step: int) -> Failure:
    """Return a worker's failure as the budget weighs it."""
    return Failure(cycle, budget.fingerprint(record), budget.describe(record), node, record.rank, step)
