"""How does a cycle end?  The verdict that one agent reaches and all agents of the cycle obey.

The first agent writes its verdict into the rendezvous; later verdicts do not count. A verdict with `again` starts
another cycle. Any other verdict ends the job on every node."""

from __future__ import annotations

import msgspec

from resilience.core.budget import Failure
from resilience.facts.encoding import reader, to_json_text
from resilience.facts.events import CycleOutcome, CycleReason

FAILED = 1  # exit statuses of the launcher, besides 0 and 128 + signal
WRONG_USE = 2
SHUT_DOWN = 94
EXCLUDED = 95


class CycleDecision(msgspec.Struct, frozen=True, omit_defaults=True):
    """outcome: of the cycle. again: why another cycle starts, None if the job ends. node: of the agent that reached the
    verdict. exit_code: of every agent, once the job ends. failure: what the job's budget is charged with. All agents
    charge it, because the one that reached the verdict may die before it can."""

    outcome: CycleOutcome
    node: str
    again: CycleReason | None = None
    exit_code: int = 0
    detail: str = ""
    rank: int | None = None  # the rank that failed first, according to its agent
    failure: Failure | None = None

    @property
    def is_failure(self) -> bool:
        """Return True if the cycle failed. The job had recovered from any failure of an earlier cycle."""
        return self.outcome in ("failed", "exhausted")

    @property
    def stop_signal(self) -> int | None:
        """Return the number of the signal that asked an agent to stop, None if the cycle ends for another reason."""
        return self.exit_code - 128 if self.outcome == "preempted" else None


_read = reader(CycleDecision)


def encode(verdict: CycleDecision) -> str:
    """Return the verdict as the rendezvous stores it."""
    return to_json_text(verdict)


def decode(text: str) -> CycleDecision:
    """Read a verdict. Raises: DecodeError."""
    return _read(text)
