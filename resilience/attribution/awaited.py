"""For which rank did the others wait?  The rules for an interruption in which no rank has a fault of its own.

All ranks on record waited, or only report that a connection was closed. The rank at fault was elsewhere, had continued,
or waits in another collective than the others. The positions of the ranks, and the collectives that they entered
(`core.wait_for`), identify it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set

from resilience.attribution.culprits import SURE, UNSURE, Culprit
from resilience.attribution.evidence import Evidence, waits
from resilience.attribution.symptoms import Class, Symptom, hung_in, is_inside, main_stack
from resilience.core.hang_kind import in_collective
from resilience.core.wait_for import Walk, are_together, walk
from resilience.facts.interruptions import Frame, Hang
from resilience.facts.user_frames import user_frame

_HUNG: Class = "hung"
HANGS: Mapping[Hang, Class] = {
    "stopped": "stopped",
    "in_kernel": "blocked_in_kernel",
    "in_loop": "busy_without_progress",
    "holds_gil": "blocked_in_native_code",
    "on_lock": "waits_for_lock",
}
"""Hangs in which a rank keeps others waiting, without those in which it may be waiting itself."""


def awaited_ranks(evidence: Evidence, symptoms: Mapping[int, Symptom]) -> tuple[list[Culprit], Class, set[int]]:
    """Rules 7 to 10: all ranks on record waited. Find the rank that they waited for."""
    shown = {symptom.what for symptom in symptoms.values()}
    places = {rank: place for rank in sorted(evidence.active) if (place := _place(evidence, symptoms, rank))}
    elsewhere = [
        rank for rank, place in places.items() if not (_is_waiting(evidence, rank, place) or waits(evidence, rank))
    ]
    if not shown & {"hung", "missed_completion"}:
        return ([], "ended_by_monitor", {1}) if "killed" in shown else _continued(evidence, symptoms, elsewhere)
    ending = {
        rank for rank, symptom in symptoms.items() if symptom.record.stage == "ending"
    }  # because of an echoed error
    stuck = _stuck(evidence, evidence.active - ending)
    inside = [rank for rank in elsewhere if is_inside(places[rank]) and rank not in ending]
    compared = walk_of(evidence)
    if compared.mismatch is not None:
        odd = compared.mismatch.odd or compared.mismatch.ranks
        confidence = 0.8 if compared.mismatch.odd else 0.4
        return [Culprit(rank, "desynchronised", confidence, 9) for rank in odd], "desynchronised", {9}
    if compared.cycle:
        return [Culprit(rank, "desynchronised", 0.4, 10) for rank in compared.cycle], "desynchronised", {10}
    # Ranks wait for the one that is known to hang, if it is not on record how far that one came.
    hidden = {rank: what for rank, what in stuck.items() if rank in compared.unknown}
    if hidden and not stuck.keys() & set(compared.awaited):
        return named_by(hidden, 0.7)
    if compared.awaited:
        return _awaited(evidence, compared.awaited, stuck, set(inside))
    if stuck:
        return named_by(stuck, 0.7)
    silent = (
        sorted(evidence.active - evidence.answered - set(symptoms)) if "hung" in shown and evidence.answered else []
    )
    if silent or inside:
        # Its section gives the class that its own exceeded limit would have given.
        otherwise: Class = "missed_completion" if "missed_completion" in shown else _HUNG
        classes = {rank: _class_in(evidence, rank, otherwise) for rank in (*silent, *inside)}
        return named_by(classes, 0.6 if silent else 0.7)
    late = sorted(evidence.active - evidence.returned)
    is_skipped = "missed_completion" in shown and all(waits(evidence, rank) for rank in late)
    gone = sorted(evidence.returned & evidence.active) if ending or is_skipped else []
    if gone and len(gone) * 2 <= len(evidence.active):
        return named_by(dict.fromkeys(gone, "went_on"), 0.6)
    if "missed_completion" in shown and late:
        return named_by(dict.fromkeys(late, "missed_completion"), 0.6)
    if not evidence.active or not evidence.is_whole or not evidence.active <= set(places):
        return [], "hung", set()
    return _odd_ones(evidence, places)


def _stuck(evidence: Evidence, ranks: Set[int]) -> dict[int, Class]:
    """Return which of these ranks are known to hang, and how."""
    return {
        # A section says more than the lock that the rank waits for in it, even if the rank's own limit fired first.
        rank: _class_in(evidence, rank, HANGS[word]) if word == "on_lock" else HANGS[word]
        for rank, word in sorted(evidence.hangs.items())
        if word in HANGS and rank in ranks
    }


def named_by(classes: Mapping[int, Class], confidence: float) -> tuple[list[Culprit], Class, set[int]]:
    """Rule 7: blame these ranks. If there are several, each is only a candidate."""
    confidence = confidence if len(classes) == 1 else UNSURE
    return [Culprit(rank, what, confidence, 7) for rank, what in classes.items()], next(iter(classes.values())), {7}


def _continued(
    evidence: Evidence, symptoms: Mapping[int, Symptom], elsewhere: list[int]
) -> tuple[list[Culprit], Class, set[int]]:
    """Rule 7: only errors of communication calls are on record. A rank that returned closed its connections, and calls
    run into their timeout if a rank has not joined. A rank that was elsewhere may only have been slower."""
    others = evidence.active - set(symptoms)
    if not symptoms:
        return [], "unknown", set()
    gone = sorted(others & {*evidence.returned, *walk_of(evidence).awaited})
    if 0 < len(gone) * 2 <= len(evidence.active):
        return named_by(dict.fromkeys(gone, "went_on"), 0.6)
    slow = [rank for rank in elsewhere if rank in others]
    if 0 < len(slow) * 2 <= len(evidence.active):
        return named_by(dict.fromkeys(slow, "went_on"), UNSURE)
    return [], "unknown", set()


def _awaited(
    evidence: Evidence, awaited: tuple[int, ...], stuck: Mapping[int, Class], inside: Set[int]
) -> tuple[list[Culprit], Class, set[int]]:
    """Rule 10: the walk from rank to rank ended at these ranks. Their known positions give their class."""
    # A rank that is known to hang comes before ranks that have only not come so far.
    ranks = [rank for rank in awaited if rank in stuck] or list(awaited)
    is_proven = len(awaited) == 1 and (ranks[0] in stuck or ranks[0] in inside)
    confidence = UNSURE if len(ranks) > 1 else SURE if is_proven else 0.7
    blamed = []
    for rank in ranks:
        if waits(evidence, rank):
            what: Class = "desynchronised"  # it waits in a collective that the others have left
        elif rank in evidence.returned:
            what = "went_on"
        else:
            what = stuck.get(rank) or _class_in(evidence, rank, _HUNG)
        blamed.append(Culprit(rank, what, confidence, 10))
    return blamed, blamed[0].what, {10}


def _class_in(evidence: Evidence, rank: int, otherwise: Class) -> Class:
    """Return the class of a hang that a rank's sections and its place show."""
    return hung_in(evidence.sections.get(rank, ()), otherwise, evidence.stacks.get(rank, ()))


def _place(evidence: Evidence, symptoms: Mapping[int, Symptom], rank: int) -> tuple[Frame, ...]:
    """Return a rank's stack when the interruption began. A stack inside a collective wins."""
    known = evidence.stacks.get(rank, ())
    symptom = symptoms.get(rank)
    if symptom is None or symptom.is_own or _is_waiting(evidence, rank, known):
        return known
    record = symptom.record
    before = record.exception.stack if record.exception is not None else main_stack(record)
    return before if _is_waiting(evidence, rank, before) else known


def _is_waiting(evidence: Evidence, rank: int, stack: tuple[Frame, ...]) -> bool:
    return in_collective(stack, evidence.hangs.get(rank))


def _odd_ones(evidence: Evidence, places: Mapping[int, tuple[Frame, ...]]) -> tuple[list[Culprit], Class, set[int]]:
    """Rules 8 and 9: all ranks wait. Return the ranks that wait at another place than most, unless all are in the same
    collective."""
    steps = evidence.steps if evidence.active <= set(evidence.steps) else {}
    sites = {rank: (user_frame(places[rank]), steps.get(rank)) for rank in sorted(evidence.active)}
    counts = Counter(sites.values())
    # Lines may differ though the collective is the same, as where one rank alone calls a function that logs.
    if len(counts) == 1 or are_together(evidence.collectives, evidence.active):
        return [], "communication", {8}
    fewest = min(counts.values())
    odd = [rank for rank, site in sites.items() if counts[site] == fewest]
    confidence = 0.7 if len(odd) * 2 < len(sites) else 0.4
    return [Culprit(rank, "desynchronised", confidence, 9) for rank in odd], "desynchronised", {9}


def walk_of(evidence: Evidence) -> Walk:
    waiting = {rank for rank in evidence.active if waits(evidence, rank)}
    last = {rank: entries for rank, entries in evidence.collectives.items() if rank in evidence.active}
    return walk(last, waiting, evidence.seats or {rank: rank for rank in evidence.active})
