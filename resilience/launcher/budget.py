"""The job's failures, in its store: one list that all agents read and whoever's verdict stands appends to.

What a failure brings about is decided by `core.budget`. An entry is written by one operation under the
first free number, and not at all if its cycle has one: an agent that dies on the way leaves the list as it
was, one that asks twice, or at the same moment as another, adds nothing. Nothing here waits. Every method
raises StoreError if the store does not answer."""

from __future__ import annotations

import math
import time

import msgspec

from resilience.adapters.store import StoreLike, execute
from resilience.core import budget
from resilience.core.attribution import InterruptionRecord
from resilience.core.budget import Answer, Budget, Failure
from resilience.core.restart import CompareSet, Read

_decoder = msgspec.json.Decoder(Failure)


class JobBudget:
    """One agent's view of the job's budget. Main thread only."""

    def __init__(self, store: StoreLike, allowed: Budget) -> None:
        """store: of the job, outliving cycles. What stands there already is older than this agent: by its clock
        it happened at no known time, outside of any window."""
        self._store = store
        self._allowed = allowed
        self._seen: list[Failure] = []
        self._read(-math.inf)

    @property
    def used(self) -> int:
        """How many cycles of the job have failed. To be asked in each cycle, for failures get their time now."""
        return len(self.history())

    def history(self) -> list[Failure]:
        """Return all failures, oldest first, timed by when this agent first saw them."""
        self._read(time.monotonic())
        return list(self._seen)

    def decide(self, failure: Failure) -> Answer:
        """Return what follows from a failure. Nothing is spent yet."""
        return budget.decide(self._allowed, self.history(), msgspec.structs.replace(failure, at=time.monotonic()))

    def spend(self, failure: Failure) -> None:
        """Note what a cycle ended with, unless that is known."""
        text = msgspec.json.encode(msgspec.structs.replace(failure, at=0.0)).decode()
        while all(past.cycle != failure.cycle for past in self.history()):
            execute(CompareSet(f"failure/{len(self._seen)}", text), self._store)

    def _read(self, at: float) -> None:
        """Read on where the list ended when it was read last."""
        while True:
            (text,) = execute(Read((f"failure/{len(self._seen)}",)), self._store)
            if text is None:
                return
            self._seen.append(msgspec.structs.replace(_decoder.decode(text), at=at))


def failure_of(record: InterruptionRecord, cycle: int, node: str, step: int, ran: float = 0.0) -> Failure:
    """Return a worker's failure as the budget weighs it. ran: seconds for which the cycle's workers had run."""
    return Failure(cycle, budget.fingerprint(record), budget.describe(record), node, record.rank, step, ran=ran)
