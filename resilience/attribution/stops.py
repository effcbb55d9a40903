"""Which ranks ended only because they were asked to?  When a process ends, its launcher ends the others.

It sends them SIGTERM, and torchrun sends SIGKILL to those that have not ended after a while. Such ranks follow the
first end, as far as the clocks of their nodes show the order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence, Set
from functools import partial

import msgspec

from resilience.attribution.culprits import UNSURE
from resilience.attribution.evidence import Evidence, apart_ns, symptoms_of
from resilience.attribution.reach import NOTICED_WITHIN_NS
from resilience.attribution.symptoms import KILLED_AFTER, TORCHRUN_STOPS_WITHIN, Symptom, ends_process
from resilience.facts.interruptions import Interruption, InterruptionRecord


def follows(symptom: Symptom, reason: str) -> Symptom:
    """Return the symptom as that of a rank which only followed another one."""
    return msgspec.structs.replace(symptom, is_own=False, confidence=0.0, reason=reason)


def without_stops(evidence: Evidence, symptoms: dict[int, Symptom]) -> dict[int, Symptom]:
    """Return the symptoms. When a process ends, the launcher asks the others to stop: these only follow.

    A process that answered an interruption before it ended did not cause it. So only ranks that had answered as well,
    and are restarting, can follow it. They also follow the first rank that somebody asked to stop."""
    is_stop = partial(_is_stop, evidence, _earliest_ends(evidence))
    stops = {rank: symptom for rank, symptom in symptoms.items() if is_stop(symptom)}
    if not stops:
        return symptoms
    asked = {rank for rank, symptom in symptoms_of(evidence).items() if is_stop(symptom)}
    gone = [record for record in evidence.records if ends_process(record) or record.rank in evidence.left]
    first = _first_of_nodes(gone, asked | evidence.answered)
    any_first = _first_of_nodes(gone, asked & evidence.answered)
    reason = "was asked to stop after another rank's process died"
    shown = dict(symptoms)
    for rank, symptom in stops.items():
        record, ends = symptom.record, any_first if rank in evidence.answered else first
        latest_ns = (record.detected_wall_ns or 0) + NOTICED_WITHIN_NS
        if any(latest_ns > (end.detected_wall_ns or 0) for end in ends):  # mostly the first one
            shown[rank] = follows(symptom, reason)
        elif any(latest_ns + apart_ns(evidence, record, end) > (end.detected_wall_ns or 0) for end in ends):
            shown[rank] = msgspec.structs.replace(symptom, confidence=UNSURE)  # by the clocks it may have
    return shown


def _first_of_nodes(gone: Iterable[InterruptionRecord], without: Set[int]) -> list[InterruptionRecord]:
    """Return the first end on each node, without those of some ranks, the earliest first."""
    ends: dict[str | None, InterruptionRecord] = {}
    for record in gone:
        if record.detected_wall_ns is not None and record.rank not in without:
            before = ends.setdefault(record.node, record)
            if record.detected_wall_ns < (before.detected_wall_ns or 0):
                ends[record.node] = record
    return sorted(ends.values(), key=lambda record: record.detected_wall_ns or 0)


def _is_stop(evidence: Evidence, ends: Sequence[tuple[int, int]], symptom: Symptom) -> bool:
    """Return True if a rank's process ended because it was asked to, or was killed because it did not. ends: as of
    `_earliest_ends`."""
    record = symptom.record
    is_end = symptom.is_own and record.interruption is Interruption.TERMINATED
    return is_end and (symptom.what == "told_to_stop" or _is_killed_late(evidence, ends, record))


def _is_killed_late(evidence: Evidence, ends: Sequence[tuple[int, int]], record: InterruptionRecord) -> bool:
    """Return True if a rank was killed while a launcher that had asked it to end lost patience with it."""
    if record.exit is None or record.exit.signal != "SIGKILL" or record.exit.oom or record.rank in evidence.signalled:
        return False
    first_ns = next((at_ns for at_ns, rank in ends if rank != record.rank), None)
    if record.detected_wall_ns is None or first_ns is None:
        return False
    return KILLED_AFTER <= (record.detected_wall_ns - first_ns) / 1e9 <= TORCHRUN_STOPS_WITHIN


def _earliest_ends(evidence: Evidence) -> list[tuple[int, int]]:
    """Return the times and ranks of the earliest ends of two processes, if the launcher kills those that end late."""
    first: dict[int, int] = {}
    for record in evidence.records if evidence.kills_late else ():
        if ends_process(record) and record.detected_wall_ns is not None:
            first[record.rank] = min(record.detected_wall_ns, first.get(record.rank, record.detected_wall_ns))
    return heapq.nsmallest(2, ((at_ns, rank) for rank, at_ns in first.items()))
