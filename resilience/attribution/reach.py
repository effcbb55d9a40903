"""Which hangs does another rank's end not explain?  Causes have times, and a reach.

When a rank ends or raises, ranks that wait for it fall silent, and all ranks are interrupted. So a hang beside an end
follows from it, unless the times on record say otherwise. It is older if its limit was exceeded before the end: a
silence within the limit may be normal work. It is later if it began out of the end's reach: a rank that still gives a
sign of life then was not stopped by the end. In both cases the rank must hang in a way in which it waits for no rank,
or be the one rank that all others wait for."""

from __future__ import annotations

import msgspec

from resilience.attribution.awaited import HANGS, walk_of
from resilience.attribution.evidence import Evidence, apart_ns, symptoms_of
from resilience.attribution.symptoms import Symptom
from resilience.facts.interruptions import HANGS as LIMITS
from resilience.facts.interruptions import Interruption

NOTICED_WITHIN_NS = 1_000_000_000  # on a busy machine, monitors may notice two ends in the wrong order
REACH_NS = 10_000_000_000
"""The time after an end in which ranks may fall silent because of it. The loss of a whole node is noticed about 8 s
after its end, and any other end sooner; then every rank is interrupted."""
_WAITS_FOR_NO_RANK = HANGS.keys() - {"in_loop"}  # a rank that waits for its device may seem to loop


class OwnHangs(msgspec.Struct, frozen=True):
    """Hung ranks whose hangs no end explains. older: than all ends. later: at least one end came before. unsure: older,
    unless the clocks of two nodes are as far apart as they may be."""

    older: tuple[Symptom, ...] = ()
    later: tuple[Symptom, ...] = ()
    unsure: tuple[Symptom, ...] = ()


def own_hangs(evidence: Evidence, hung: list[Symptom], ends: list[Symptom]) -> OwnHangs:
    """Rule 11: return the hung ranks whose hangs these ends and exceptions do not explain."""
    awaited = walk_of(evidence).awaited
    exact = msgspec.structs.replace(evidence, clock_errors={})
    older, later, unsure = [], [], []
    for symptom in hung:
        limit = _first_limit(evidence, symptom, awaited == (symptom.rank,))
        if limit is None:
            continue
        if all(is_before(evidence, limit, end) for end in ends):
            older.append(symptom)
        elif all(is_before(evidence, limit, end) or began_out_of_reach(evidence, limit, end) for end in ends):
            later.append(symptom)
        elif all(is_before(exact, limit, end) for end in ends):
            unsure.append(symptom)
    return OwnHangs(tuple(older), tuple(later), tuple(unsure))


def _first_limit(evidence: Evidence, symptom: Symptom, is_awaited: bool) -> Symptom | None:
    """Return what a hung rank showed at the first limit that it exceeded, without limits in a wait for another rank.
    None if it may always have waited. is_awaited: the others wait for this rank alone."""
    records = [record for record in evidence.records if record.rank == symptom.rank and record.interruption in LIMITS]
    shown = [symptoms_of(msgspec.structs.replace(evidence, records=(record,)))[symptom.rank] for record in records]
    own = [limit for limit in shown if limit.is_own and (limit.record.hang in _WAITS_FOR_NO_RANK or is_awaited)]
    return min(own, key=lambda limit: limit.record.detected_wall_ns or 0, default=None)


def is_before(evidence: Evidence, symptom: Symptom, other: Symptom) -> bool:
    """Return True if a rank ended, or exceeded a limit, before another rank's end or exception, however far apart the
    clocks of their nodes may be. Any other hang, or the loss of a node, is older than its record."""
    ended_ns, other_ns = symptom.record.detected_wall_ns, other.record.detected_wall_ns
    is_instant = other.rule == 2 or other.record.interruption is Interruption.TERMINATED
    if ended_ns is None or other_ns is None or not is_instant:
        return False
    return ended_ns + NOTICED_WITHIN_NS + apart_ns(evidence, symptom.record, other.record) < other_ns


def began_out_of_reach(evidence: Evidence, hang: Symptom, end: Symptom) -> bool:
    """Return True if a hung rank still gave a sign of life when another rank's end could no longer stop it."""
    record, ended_ns = hang.record, end.record.detected_wall_ns
    if record.interruption not in LIMITS or record.silent_for_s is None:
        return False
    if record.detected_wall_ns is None or ended_ns is None:
        return False
    began_ns = record.detected_wall_ns - round(record.silent_for_s * 1e9)
    return began_ns > ended_ns + REACH_NS + apart_ns(evidence, record, end.record)
