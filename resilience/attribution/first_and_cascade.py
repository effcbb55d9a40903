"""Which interruptions of a cycle came first, and which followed from others?  What a node's metrics count of them."""

from __future__ import annotations

from collections.abc import Iterator

from resilience.attribution.launch_incidents import WISHED
from resilience.attribution.symptoms import category_of, symptom
from resilience.core.attribution import Interruption, InterruptionRecord
from resilience.history.cycles import NODE_LOST, NodeCycle


def interruptions_of(part: NodeCycle) -> Iterator[tuple[str, str, str]]:
    """Yield kind, category and place ("first" or "cascade") of each interruption of a node's cycle that has ended."""
    is_wished = part.ended is not None and part.ended.outcome in WISHED  # then ranks end, and none of them failed
    for record, place in () if is_wished else _places(part):
        yield record.interruption.value, category_of(record), place
    if part.decided is not None and part.decided.fingerprint.startswith(NODE_LOST):  # it cannot tell itself
        yield Interruption.UNRESPONSIVE.value, "host", "first"


def _places(part: NodeCycle) -> list[tuple[InterruptionRecord, str]]:
    """A cycle's interruptions, and of each whether it was the first or followed from it."""
    own = [seen.record for seen in sorted(part.seen, key=lambda seen: seen.at_ns) if part.is_own(seen.record)]
    first = part.mover
    is_elsewhere = part.is_failed and part.decided is None
    if first is None and not is_elsewhere:
        first = next((record.rank for record in own if symptom(record).is_own), None)
    told: list[tuple[InterruptionRecord, str]] = []
    known: set[tuple[int, bool]] = set()
    for record in own:
        is_end = record.interruption is Interruption.TERMINATED
        if (record.rank, is_end) in known:
            continue  # its monitor and the agent have both seen it
        # An end after a limit fired is that limit's doing.
        is_first = record.rank == first and not (is_end and (record.rank, False) in known)
        known.add((record.rank, is_end))
        told.append((record, "first" if is_first else "cascade"))
    return told
