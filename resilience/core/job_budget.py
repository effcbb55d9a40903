"""Which failures has the job had?  One list in the job's store that all agents read and append to.

`core.budget` decides what follows from a failure. A cycle has at most one entry (`core.shared_list`): an agent that
asks twice, or at the same time as another agent, adds nothing. Nothing here waits."""

from __future__ import annotations

import math

import msgspec

from resilience.core import budget
from resilience.core.agent_protocol import Protocol, ReadClock, Seconds
from resilience.core.budget import Answer, Budget, Failure
from resilience.core.shared_list import SharedList
from resilience.facts import encoding
from resilience.facts.interruptions import InterruptionRecord

_read = encoding.reader(Failure)


class JobBudget:
    """One agent's view of the job's budget. `open` comes first."""

    def __init__(self, allowed: Budget, name: str = "job/failure") -> None:
        """name: beginning of the list's keys; they outlive cycles."""
        self._list = SharedList(name)
        self._allowed = allowed
        self._failures: list[Failure] = []

    def open(self) -> Protocol[None]:
        """Read the entries from before this agent took part, at its start and later as a spare. Their time is unknown,
        so they lie outside any window."""
        yield from self._read(-math.inf)

    def used(self) -> Protocol[int]:
        """Return how many cycles of the job have failed. Call it in each cycle: it also timestamps new failures."""
        return len((yield from self.history()))

    def history(self) -> Protocol[list[Failure]]:
        """Return all failures, oldest first. Their time is when this agent first read them."""
        yield from self._read((yield ReadClock()))
        return list(self._failures)

    @property
    def same_in_a_row(self) -> int:
        """Return how many times in a row the job last failed in the same way without progress, 0 if it never failed.
        Counts the failures that this agent has read."""
        if not self._failures:
            return 0
        *earlier, last = self._failures
        return budget.same_in_a_row(self._allowed, earlier, last)

    def decide(self, failure: Failure) -> Protocol[Answer]:
        """Return what follows from a failure, without spending a restart."""
        history = yield from self.history()
        return budget.decide(self._allowed, history, msgspec.structs.replace(failure, at=(yield ReadClock())))

    def spend(self, failure: Failure) -> Protocol[None]:
        """Append the failure of a cycle, unless the cycle has an entry."""

        def is_known() -> Protocol[bool]:
            return any(past.cycle == failure.cycle for past in (yield from self.history()))

        yield from self._list.append(encoding.to_json_text(msgspec.structs.replace(failure, at=0.0)), is_known)

    def _read(self, at: Seconds) -> Protocol[None]:
        texts = yield from self._list.read()
        self._failures += [msgspec.structs.replace(_read(text), at=at) for text in texts]


def failure_of(
    record: InterruptionRecord,
    cycle: int,
    node: str,
    step: int,
    ran: float = 0.0,
    why_not: str = "",
    is_python: bool = False,
) -> Failure:
    """Return a worker's failure for the budget. ran: seconds that the cycle's workers had run; why_not: why the program
    cannot start, empty if it can; is_python: the program is a Python script or module."""
    is_final = bool(why_not) or budget.is_of_an_import(record)
    what = why_not or budget.describe(record)
    return Failure(
        cycle,
        budget.fingerprint(record),
        what,
        node,
        record.rank,
        step,
        ran=ran,
        is_final=is_final,
        silent_for_s=record.silent_for_s,
        kind="usage error" if is_python and budget.is_usage_error(record, ran) else budget.kind_of(record),
    )
