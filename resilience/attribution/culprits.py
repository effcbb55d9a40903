"""How surely is a rank blamed, and by which rule?  A culprit, the rules, and the confidences that mean something.

At least a share c of the verdicts with confidence c should name the right rank. The campaign has shown that for 0.9 and
0.95 (docs/benchmark.md); lower ones are only ordinal. Below NAMED no rank is named, and below SURE nothing acts on a
verdict."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from resilience.attribution.symptoms import Class

RULES: Mapping[int, str] = {
    1: "process or node ended",
    2: "first exception",
    3: "a waiting rank is a victim",
    4: "stopped or blocked in the kernel",
    5: "holds the interpreter",
    6: "busy without progress",
    7: "hung outside a collective",
    8: "joined, not complete",
    9: "desynchronised",
    10: "wait-for walk",
    11: "a hang that no death explains",
    14: "common mode",
    16: "store lost",
}
"""The rules by their numbers in docs/account.md. The design's rules 11 to 13 and 15 were not built; this 11 is another
one."""

SURE = 0.9
"""The least confidence on which a decision may act: to exclude a node, or count a fault against a rank."""
NAMED = 0.5
"""The confidence below which a rank is only a candidate."""
UNSURE = 0.4
"""The confidence of a rank that is one of several explanations."""


class Culprit(msgspec.Struct, frozen=True):
    """A blamed rank. confidence: 0 to 1, as the header says."""

    rank: int
    what: Class
    confidence: float
    rule: int
