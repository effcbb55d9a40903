"""When is a rank late compared with its own past?  Checked long before a learned limit ends it; only a look follows.

With a limit that has a margin, a hang costs several times the longest healthy duration. A suspicion comes at LATE times
the longest one, and records where the rank is while it is still there. First occurrences after a start are slow, so
they are not suspected. `core.shadow` checks these limits and reports each silence once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import msgspec

from resilience.core.deadlines import Start, section_of
from resilience.core.watch import NO_LIMIT, First, Learned, Limit, Limits

LATE = 1.25  # times the longest healthy duration
LEAST = 0.25  # of the limit: a look costs time, and short pauses of a busy host are normal
SOON = 0.75  # of the limit: a later suspicion would be useless


def limits_of(limits: Limits) -> Limits | None:
    """Return the limits beyond which a rank is suspected, None if no learned limit leaves room for a suspicion."""
    thresholds = {
        name: max(LATE * learned.longest_s, LEAST * learned.timeout_s)
        for name, learned in limits.learned.items()
        if learned.longest_s > 0.0
    }
    early = {
        name: Limit(soft=seconds)
        for name, seconds in thresholds.items()
        if seconds < SOON * limits.learned[name].timeout_s
    }
    if not early:
        return None
    sections = {section: limit for name, limit in early.items() if (section := section_of(name)) is not None}
    signs = {name: limit for name, limit in early.items() if section_of(name) is None}
    suspected: Limits = msgspec.structs.replace(Limits(sections=sections, first=_first(limits.learned)), **signs)
    return suspected


def _first(learned: Mapping[str, Learned]) -> dict[str, First]:
    return {name: First(known.first, dict.fromkeys(get_args(Start), NO_LIMIT)) for name, known in learned.items()}
