"""When is a rank late against its own past?  Weighed long before a learned limit ends it; a look is all that follows.

A limit with a margin lets a hang cost several times the longest healthy duration. A suspicion comes at LATE times the
longest one: where the rank is goes on record while it is still there. First occurrences after a start are slow, so they
are not suspected. `core.shadow` weighs these limits and reports each silence once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import msgspec

from resilience.core.deadlines import Start, section_of
from resilience.core.watch import NO_LIMIT, First, Learned, Limit, Limits

LATE = 1.25  # times the longest healthy duration
LEAST = 0.25  # of the limit: a look costs time, and short pauses of a busy host are no news
SOON = 0.75  # of the limit: a later suspicion is no news either


def limits_of(limits: Limits) -> Limits | None:
    """Return the limits past which a rank is suspected, None if no learned limit leaves room for a suspicion."""
    moments = {
        name: max(LATE * known.longest_s, LEAST * known.timeout_s)
        for name, known in limits.learned.items()
        if known.longest_s > 0.0
    }
    after = {name: Limit(soft=at) for name, at in moments.items() if at < SOON * limits.learned[name].timeout_s}
    if not after:
        return None
    sections = {section: limit for name, limit in after.items() if (section := section_of(name)) is not None}
    signs = {name: limit for name, limit in after.items() if section_of(name) is None}
    suspected: Limits = msgspec.structs.replace(Limits(sections=sections, first=_first(limits.learned)), **signs)
    return suspected


def _first(learned: Mapping[str, Learned]) -> dict[str, First]:
    return {name: First(known.first, dict.fromkeys(get_args(Start), NO_LIMIT)) for name, known in learned.items()}
