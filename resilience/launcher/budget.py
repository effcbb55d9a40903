"""The job's failures, in its store: one list that all agents read and whoever's verdict stands appends to.

What a failure brings about is decided by `core.budget`. A cycle has one entry at most (`shared_list`): an agent
that asks twice, or at the same moment as another, adds nothing. Nothing here waits. Every method raises
StoreError if the store does not answer."""

from __future__ import annotations

import math
import time

import msgspec

from resilience.adapters.store import StoreLike
from resilience.core import budget, encoding
from resilience.core.attribution import InterruptionRecord
from resilience.core.budget import Answer, Budget, Failure
from resilience.launcher.shared_list import SharedList

_read = encoding.reader(Failure)


class JobBudget:
    """One agent's view of the job's budget. Main thread only."""

    def __init__(self, store: StoreLike, allowed: Budget) -> None:
        """store: of the job, outliving cycles. What stands there already is older than this agent: by its clock
        it happened at no known time, outside of any window."""
        self._list = SharedList(store, "failure")
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
        text = encoding.to_json_text(msgspec.structs.replace(failure, at=0.0))
        self._list.append(text, lambda: any(past.cycle == failure.cycle for past in self.history()))

    def _read(self, at: float) -> None:
        self._seen += [msgspec.structs.replace(_read(text), at=at) for text in self._list.read()]


def failure_of(
    record: InterruptionRecord, cycle: int, node: str, step: int, ran: float = 0.0, why_not: str = ""
) -> Failure:
    """Return a worker's failure as the budget weighs it. ran: seconds for which the cycle's workers had run; why_not:
    why the program cannot start, empty if it can."""
    is_final = bool(why_not) or budget.is_of_an_import(record)
    what = why_not or budget.describe(record)
    return Failure(cycle, budget.fingerprint(record), what, node, record.rank, step, ran=ran, is_final=is_final)
