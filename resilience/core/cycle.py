"""How does a cycle end?  The verdict that one agent reaches and all agents of the cycle obey.

Whoever is first writes it into the rendezvous; what the others would have written does not count. A
verdict with `again` starts another cycle, any other ends the job on every node."""

from __future__ import annotations

import msgspec

from resilience.core.budget import Failure
from resilience.core.encoding import reader, to_json_text
from resilience.core.events import CycleOutcome, CycleReason

FAILED = 1  # exit statuses of the launcher, beside 0, 2 for wrong use, and 128 + signal
SHUT_DOWN = 94
EXCLUDED = 95


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """outcome: of the cycle. again: why another one starts, None if the job ends. node: who reached it.
    exit_code: of every agent, once the job ends. failure: what the job's budget is charged with, by all who obey,
    for who reached the verdict may be gone before it could."""

    outcome: CycleOutcome
    node: str
    again: CycleReason | None = None
    exit_code: int = 0
    detail: str = ""
    rank: int | None = None  # that failed first, as its agent saw it
    failure: Failure | None = None


COMPLETED = Verdict(outcome="completed", node="")

_read = reader(Verdict)


def encode(verdict: Verdict) -> str:
    """Return the verdict as it stands in the rendezvous."""
    return to_json_text(verdict)


def decode(text: str) -> Verdict:
    """Read a verdict. Raises: DecodeError."""
    return _read(text)
