"""Whose fault was it?  The attribution rules, over everything that is known of one interruption.

Each rank that has something on record has a symptom (`attribution.symptoms`). The rules weigh the ranks against
each other: who only reported what somebody else had done, who waited for whom, what all had in common.
The answer names where the symptom is, not a cause in hardware; "unknown" is an answer. Rules are
numbered as in docs/account.md; the ones that could not run for lack of data are named with what they lack.

Of the verdicts with confidence c, a share of at least c names the right rank (docs/benchmark.md). Below NAMED nobody is
named, and below SURE nothing acts on a verdict."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Set

import msgspec

from resilience.attribution.symptoms import (
    Class,
    Symptom,
    category,
    gives_up,
    hung_in,
    is_inside,
    main_stack,
    symptom,
)
from resilience.core.attribution import Category, Collective, Frame, Hang, Interruption, InterruptionRecord
from resilience.core.hangs import in_backward, in_collective
from resilience.core.user_frames import user_frame
from resilience.core.wait_for import Walk, walk

RULES: Mapping[int, str] = {
    1: "exit known",
    2: "first exception",
    3: "who waits is a victim",
    4: "stopped or blocked in the kernel",
    5: "holds the interpreter",
    6: "busy without progress",
    7: "never joined the collective",
    8: "joined, not complete",
    9: "desynchronised",
    10: "wait-for walk",
    14: "common mode",
    16: "store lost",
}


SURE = 0.9
"""The confidence that a decision which acts on a verdict needs: to exclude a node, or count a fault against a rank."""
NAMED = 0.5
"""The confidence below which a rank is only a candidate."""
NOTICED_WITHIN_NS = 1_000_000_000  # monitors notice two ends in another order than they came, on a busy machine
_HUNG: Class = "hung"
_HANGS: Mapping[Hang, Class] = {
    "stopped": "stopped",
    "in_kernel": "blocked_in_kernel",
    "in_loop": "busy_without_progress",
    "holds_gil": "blocked_in_native_code",
    "on_lock": "waits_for_lock",
}
"""Ways in which a rank keeps others waiting; not those in which it may be waiting itself."""
_CATEGORIES: Mapping[Class, Category] = {"stopped": "host", "blocked_in_kernel": "storage"}


class Culprit(msgspec.Struct, frozen=True):
    """A rank that is blamed. confidence: 0 to 1, ordinal."""

    rank: int
    what: Class
    confidence: float
    rule: int


class Exonerated(msgspec.Struct, frozen=True):
    """Ranks that are not to blame, and why."""

    ranks: tuple[int, ...]
    reason: str


class Blind(msgspec.Struct, frozen=True):
    """A rule that could not run, and what it lacks."""

    rule: int
    lacks: str


class Verdict(msgspec.Struct, frozen=True):
    """Who is to blame, of what, and how that was found. first: the first mover's initial rank. candidates: ranks that
    may be to blame, with too little confidence to be named; where nobody is named beside them, `what` is unknown."""

    what: Class
    category: Category
    first: int | None = None
    culprits: tuple[Culprit, ...] = ()
    candidates: tuple[Culprit, ...] = ()
    cascade: tuple[int, ...] = ()
    exonerated: tuple[Exonerated, ...] = ()
    rules_fired: tuple[int, ...] = ()
    rules_blind: tuple[Blind, ...] = ()

    @property
    def sure(self) -> tuple[Culprit, ...]:
        """The culprits against whom a decision may act: to exclude a node, or count a fault against a rank."""
        return tuple(culprit for culprit in self.culprits if culprit.confidence >= SURE)


class Evidence(msgspec.Struct, frozen=True):
    """Everything known of one interruption. Ranks are initial ranks.

    records: each rank's in the order it made them. first: whose record reached the store first.
    stacks: where each rank's main thread was when it learned of the interruption, innermost last.
    hangs: in which way ranks hung of which no limit was exceeded. sections: open ones, of ranks that are known.
    collectives: the last ones of each rank. seats: initial ranks by torch's ranks, where they differ.
    returned: ranks whose function had returned by then. signalled: ranks that our monitor signalled,
    with the limit that made it."""

    records: tuple[InterruptionRecord, ...] = ()
    first: int | None = None
    active: frozenset[int] = frozenset()
    inactive: frozenset[int] = frozenset()
    stacks: dict[int, tuple[Frame, ...]] = {}
    steps: dict[int, int] = {}
    hangs: dict[int, Hang] = {}
    sections: dict[int, tuple[str, ...]] = {}
    collectives: dict[int, tuple[Collective, ...]] = {}
    seats: dict[int, int] = {}
    answered: frozenset[int] = frozenset()
    returned: frozenset[int] = frozenset()
    signalled: dict[int, str] = {}
    store_lost: frozenset[int] = frozenset()


def judge(seen: Evidence) -> Verdict:
    """Return who is to blame for an interruption."""
    hangs = {record.rank: record.hang for record in seen.records if record.hang is not None}
    entered = {record.rank: record.last_collectives for record in seen.records if record.last_collectives}
    seen = msgspec.structs.replace(seen, hangs=hangs | seen.hangs, collectives=entered | seen.collectives)
    symptoms = _without_stops(seen, _without_consequences(_without_lost_monitors(_symptoms(seen))))
    verdict = _named(_store_lost(seen) or _common(seen, symptoms) or _culprits(seen, symptoms))
    guilty = {culprit.rank for culprit in (*verdict.culprits, *verdict.candidates)}
    reported = [found.rank for found in symptoms.values() if found.rank not in guilty]
    first = verdict.first
    if first is None and verdict.culprits:
        first = verdict.culprits[0].rank
    return msgspec.structs.replace(
        verdict,
        first=seen.first if first is None and not verdict.candidates else first,
        cascade=tuple(sorted(reported)) if verdict.what != "store_lost" else (),
        exonerated=_exonerated(seen, symptoms, guilty, verdict),
        rules_blind=_blind(seen, verdict.rules_fired),
    )


def _named(verdict: Verdict) -> Verdict:
    """Return the verdict; ranks with too little confidence are only candidates."""
    named = tuple(culprit for culprit in verdict.culprits if culprit.confidence >= NAMED)
    if len(named) == len(verdict.culprits):
        return verdict
    candidates = tuple(culprit for culprit in verdict.culprits if culprit not in named)
    if named:
        return msgspec.structs.replace(verdict, culprits=named, candidates=candidates)
    return Verdict("unknown", "unknown", candidates=candidates, rules_fired=verdict.rules_fired)


def _symptoms(seen: Evidence) -> dict[int, Symptom]:
    """The most telling symptom of each rank, the first reporter's first; own faults win over echoes."""
    found: dict[int, Symptom] = {}
    for record in seen.records:
        if record.hang == "in_call" and seen.hangs.get(record.rank) == "in_collective":
            # It has seen so itself before anything was cut. Its monitor may have looked when the restart had begun. Any
            # other word of the monitor stands: the signal that asks for stacks may have ended what the rank was in.
            record = msgspec.structs.replace(record, hang="in_collective")
        rank = record.rank
        new = symptom(record, seen.signalled.get(rank), seen.stacks.get(rank, ()), seen.sections.get(rank, ()))
        old = found.get(new.rank)
        is_graver = new.record.interruption is Interruption.HARD_TIMEOUT and old is not None and old.rule > 2
        if old is None or (new.is_own and not old.is_own) or (is_graver and new.is_own >= old.is_own):
            found[new.rank] = new
    order = sorted(found, key=lambda rank: (rank != seen.first, _arrival(found[rank].record), rank))
    return {rank: found[rank] for rank in order}


def _without_lost_monitors(symptoms: dict[int, Symptom]) -> dict[int, Symptom]:
    """Return the symptoms; beside a fault or a hang of any rank, the loss of a monitor is nobody's."""
    if not any(found.what != "monitor_lost" and (found.is_own or found.what == "hung") for found in symptoms.values()):
        return symptoms
    why = "only its monitor was lost, which interrupts no rank"
    return {
        rank: msgspec.structs.replace(found, is_own=False, confidence=0.0, reason=why)
        if found.what == "monitor_lost"
        else found
        for rank, found in symptoms.items()
    }


def _without_consequences(symptoms: dict[int, Symptom]) -> dict[int, Symptom]:
    """Return the symptoms; where a rank has a fault of its own, others only follow that give up, or whose hooks fail in
    the restart."""

    def why(found: Symptom) -> str:
        if gives_up(found.record):
            return "gave up after another rank's fault"
        is_restarting = found.record.stage in ("finalize", "health_check", "barrier")
        return "its hook failed in the restart after another rank's fault" if is_restarting else ""

    follows = {rank: reason for rank, found in symptoms.items() if found.rule == 2 and (reason := why(found))}
    if not any(found.is_own and rank not in follows for rank, found in symptoms.items()):
        return symptoms
    return {
        rank: msgspec.structs.replace(found, is_own=False, confidence=0.0, reason=follows[rank])
        if rank in follows
        else found
        for rank, found in symptoms.items()
    }


def _without_stops(seen: Evidence, symptoms: dict[int, Symptom]) -> dict[int, Symptom]:
    """Return the symptoms; a launcher tells the others to stop when a process has died: then they only follow.

    A process that had answered an interruption before it died did not begin it."""
    ends = [
        found for found in symptoms.values() if found.is_own and found.record.interruption is Interruption.TERMINATED
    ]
    first = [found for found in ends if found.what != "told_to_stop" and found.rank not in seen.answered]
    died = [found.record.detected_wall_ns for found in first]
    began = min((at for at in died if at is not None), default=None)
    if began is None:
        return symptoms
    follows = {
        found.rank
        for found in ends
        if found.what == "told_to_stop" and (found.record.detected_wall_ns or 0) > began - NOTICED_WITHIN_NS
    }
    why = "told to stop when another rank's process had died"
    return {
        rank: msgspec.structs.replace(found, is_own=False, confidence=0.0, reason=why) if rank in follows else found
        for rank, found in symptoms.items()
    }


def _arrival(record: InterruptionRecord) -> float:
    return float("inf") if record.arrival_order is None else record.arrival_order


def _waits(seen: Evidence, rank: int) -> bool:
    stack = seen.stacks.get(rank, ())
    return in_collective(stack) or in_backward(stack) or seen.hangs.get(rank) == "in_collective"


def _store_lost(seen: Evidence) -> Verdict | None:
    everybody = seen.active | seen.inactive
    if len(seen.store_lost) * 2 <= len(everybody) or not seen.store_lost:
        return None
    return Verdict("store_lost", "host", rules_fired=(16,))


def _common(seen: Evidence, symptoms: Mapping[int, Symptom]) -> Verdict | None:
    """Rule 14: most active ranks show the same, and so does whoever was first, if that rank had a fault of its own."""
    if len(seen.active) < 2:
        return None
    first_own = {rank for rank, found in symptoms.items() if found.is_own and rank == seen.first}
    groups: defaultdict[tuple[object, ...], list[Symptom]] = defaultdict(list)
    for found in symptoms.values():
        if found.is_own and found.rank in seen.active:
            groups[_likeness(found)].append(found)
    for alike in groups.values():
        is_most = len(alike) > 1 and len(alike) * 2 > len(seen.active)
        if is_most and first_own <= {found.rank for found in alike}:
            culprits = tuple(Culprit(found.rank, found.what, 0.5, 14) for found in alike)
            first = seen.first if seen.first in {found.rank for found in alike} else None
            return Verdict("common", category(alike[0]), first, culprits, rules_fired=(alike[0].rule, 14))
    return None


def _likeness(found: Symptom) -> tuple[object, ...]:
    record = found.record
    if record.exception is not None:
        return found.what, record.exception.fingerprint
    leaf = user_frame(main_stack(record))
    place = None if leaf is None else (leaf.file, leaf.function)
    return found.what, record.exit and (record.exit.signal, record.exit.code), place


def _culprits(seen: Evidence, symptoms: Mapping[int, Symptom]) -> Verdict:
    own = [found for found in symptoms.values() if found.is_own and not found.is_guess]
    exits = [found for found in own if found.rule == 1]
    raised = [found for found in own if found.rule == 2]
    hung = [found for found in own if found.rule not in (1, 2)]
    blamed: list[Culprit] = []
    if raised:
        blamed += _blame_raised(seen, raised, alone=not exits and not hung)
    # A process that ends does so by itself: whatever else happened, it is a fault of its own.
    blamed += [Culprit(found.rank, found.what, found.confidence, 1) for found in exits]
    if hung and (not blamed or seen.first in {found.rank for found in hung}):
        awaited = _walk(seen).awaited
        blamed += [_of_hang(found, awaited) for found in hung]
    fired = {culprit.rule for culprit in blamed} | {found.rule for found in symptoms.values() if not found.is_own}
    if not blamed:
        blamed, what, rules = _absent(seen, symptoms)
        fired |= rules
        guesses = [found for found in symptoms.values() if found.is_guess]
        if guesses and not blamed:
            culprits = tuple(Culprit(found.rank, found.what, found.confidence, 2) for found in guesses)
            return Verdict(guesses[0].what, category(guesses[0]), culprits=culprits, rules_fired=(2,))
        if not blamed:
            return Verdict(what, "unknown", rules_fired=tuple(sorted(fired)))
        # They were alive, and elsewhere.
        at_fault = _CATEGORIES.get(blamed[0].what, "user_code")
        return Verdict(blamed[0].what, at_fault, culprits=tuple(blamed), rules_fired=tuple(sorted(fired)))

    def order(culprit: Culprit) -> tuple[bool, float, float, int]:
        arrival = _arrival(symptoms[culprit.rank].record)
        return culprit.rank != seen.first, arrival, -culprit.confidence, culprit.rank

    blamed.sort(key=order)
    chief = blamed[0]
    return Verdict(chief.what, category(symptoms[chief.rank]), culprits=tuple(blamed), rules_fired=tuple(sorted(fired)))


def _of_hang(found: Symptom, awaited: tuple[int, ...]) -> Culprit:
    """A rank that hangs by itself. That the others are known to wait for it, and for it alone, makes it surer."""
    confidence = max(found.confidence, SURE) if awaited == (found.rank,) else found.confidence
    return Culprit(found.rank, found.what, confidence, found.rule)


def _walk(seen: Evidence) -> Walk:
    waiting = {rank for rank in seen.active if _waits(seen, rank)}
    last = {rank: entries for rank, entries in seen.collectives.items() if rank in seen.active}
    return walk(last, waiting, seen.seats or {rank: rank for rank in seen.active})


def _blame_raised(seen: Evidence, raised: list[Symptom], alone: bool) -> list[Culprit]:
    """Rule 2: the exceptions that are known to be their ranks' own, and the one that reached the store first; where
    nothing is known, each a little."""
    ordered = [found for found in raised if found.record.arrival_order is not None]
    first = [found for found in raised if found.rank == seen.first] or ordered[:1]
    known = first[:1] + [found for found in raised if found.record.origin == "own" and found not in first[:1]]
    if known:
        return [Culprit(found.rank, found.what, found.confidence, 2) for found in known]
    if not alone:
        return []
    confidence = 0.8 if len(raised) == 1 else 0.4
    return [Culprit(found.rank, found.what, confidence, 2) for found in raised]


def _absent(seen: Evidence, symptoms: Mapping[int, Symptom]) -> tuple[list[Culprit], Class, set[int]]:
    """Rules 7 to 9: everybody on record waited. Who was it that they waited for?"""
    if any(found.what == "missed_completion" for found in symptoms.values()):
        late = sorted(seen.active - seen.returned)
        return [Culprit(rank, "missed_completion", 0.6, 7) for rank in late], "missed_completion", {7}
    places = {rank: place for rank in sorted(seen.active) if (place := _place(seen, symptoms, rank))}
    elsewhere = [rank for rank, place in places.items() if not (in_collective(place) or _waits(seen, rank))]
    if not any(found.what == "hung" for found in symptoms.values()):
        if any(found.what == "killed" for found in symptoms.values()):
            return [], "ended_by_monitor", {1}
        # Only echoes: a rank that goes on, or returns, closes its connections too.
        gone = [rank for rank in sorted(seen.active - set(symptoms)) if rank in seen.returned or rank in elsewhere]
        if not symptoms or not gone or len(gone) * 2 > len(seen.active):
            return [], "unknown", set()
        return [Culprit(rank, "went_on", 0.6 if len(gone) == 1 else 0.4, 7) for rank in gone], "went_on", {7}
    ending = {rank for rank, found in symptoms.items() if found.record.stage == "ending"}  # for an error that followed
    silent = sorted(seen.active - seen.answered - set(symptoms))
    if silent and seen.answered:
        return [Culprit(rank, "hung", 0.6, 7) for rank in silent], "hung", {7}
    stuck = {
        # A section tells more than the lock that the rank waits for in it, also where its own limit was exceeded first.
        rank: hung_in(seen.sections.get(rank, ()), _HANGS[word]) if word == "on_lock" else _HANGS[word]
        for rank, word in sorted(seen.hangs.items())
        if word in _HANGS and rank in seen.active - ending
    }
    inside = [rank for rank in elsewhere if is_inside(places[rank]) and rank not in ending]
    compared = _walk(seen)
    if compared.mismatch is not None:
        odd = compared.mismatch.odd or compared.mismatch.ranks
        confidence = 0.8 if compared.mismatch.odd else 0.4
        return [Culprit(rank, "desynchronised", confidence, 9) for rank in odd], "desynchronised", {9}
    if compared.cycle:
        return [Culprit(rank, "desynchronised", 0.4, 10) for rank in compared.cycle], "desynchronised", {10}
    if compared.awaited:
        return _awaited(seen, compared.awaited, stuck, set(inside))
    if stuck or inside:
        # Who hung by itself, rather than who was just elsewhere. Its section says the same as if its own limit had
        # been exceeded first.
        found = stuck or {rank: hung_in(seen.sections.get(rank, ()), _HUNG) for rank in inside}
        confidence = 0.7 if len(found) == 1 else 0.4
        return [Culprit(rank, what, confidence, 7) for rank, what in found.items()], next(iter(found.values())), {7}
    gone = sorted(seen.returned & seen.active) if ending else []
    if gone and len(gone) * 2 <= len(seen.active):
        return [Culprit(rank, "went_on", 0.6 if len(gone) == 1 else 0.4, 7) for rank in gone], "went_on", {7}
    if not seen.active <= set(places):
        return [], "hung", set()
    return _odd_ones(seen, places)


def _awaited(
    seen: Evidence, awaited: tuple[int, ...], stuck: Mapping[int, Class], inside: Set[int]
) -> tuple[list[Culprit], Class, set[int]]:
    """Rule 10: the walk from rank to rank ended at these. What is known of where they are tells their class."""
    blamed = []
    for rank in awaited:
        if _waits(seen, rank):
            what: Class = "desynchronised"  # it waits in a collective that the others have passed
        elif rank in seen.returned:
            what = "went_on"
        else:
            what = stuck.get(rank) or hung_in(seen.sections.get(rank, ()), _HUNG)
        confidence = SURE if len(awaited) == 1 and (rank in stuck or rank in inside) else 0.7
        blamed.append(Culprit(rank, what, confidence, 10))
    return blamed, blamed[0].what, {10}


def _place(seen: Evidence, symptoms: Mapping[int, Symptom], rank: int) -> tuple[Frame, ...]:
    """Where a rank was when the interruption began: in a collective, if anything shows that."""
    known = seen.stacks.get(rank, ())
    found = symptoms.get(rank)
    if found is None or found.is_own or in_collective(known):
        return known
    record = found.record
    before = record.exception.stack if record.exception is not None else main_stack(record)
    return before if in_collective(before) else known


def _odd_ones(seen: Evidence, places: Mapping[int, tuple[Frame, ...]]) -> tuple[list[Culprit], Class, set[int]]:
    """Rules 8 and 9: all wait. In the same place, or is it that a few wait somewhere else?"""
    steps = seen.steps if seen.active <= set(seen.steps) else {}
    sites = {rank: (user_frame(places[rank]), steps.get(rank)) for rank in sorted(seen.active)}
    counts = Counter(sites.values())
    if len(counts) == 1:
        return [], "communication", {8}
    fewest = min(counts.values())
    odd = [rank for rank, site in sites.items() if counts[site] == fewest]
    confidence = 0.7 if len(odd) * 2 < len(sites) else 0.4
    return [Culprit(rank, "desynchronised", confidence, 9) for rank in odd], "desynchronised", {9}


def _exonerated(
    seen: Evidence, symptoms: Mapping[int, Symptom], guilty: set[int], verdict: Verdict
) -> tuple[Exonerated, ...]:
    reasons: defaultdict[str, list[int]] = defaultdict(list)
    for rank in sorted(seen.active | seen.inactive | set(symptoms)):
        if rank in guilty:
            continue
        found = symptoms.get(rank)
        if found is not None and found.reason:
            reasons[found.reason].append(rank)
        elif found is not None:
            reasons["failed after the interruption had begun"].append(rank)
        elif rank in seen.inactive:
            reasons["was a spare"].append(rank)
        elif rank in seen.returned:
            reasons["had completed"].append(rank)
        elif _waits(seen, rank):
            reasons["waited in a collective for somebody else"].append(rank)
        elif verdict.what != "store_lost":
            reasons["ran within its limits"].append(rank)
    return tuple(Exonerated(tuple(ranks), reason) for reason, ranks in reasons.items())


def _blind(seen: Evidence, fired: tuple[int, ...]) -> tuple[Blind, ...]:
    hang = any(record.interruption in (Interruption.SOFT_TIMEOUT, Interruption.HARD_TIMEOUT) for record in seen.records)
    known = seen.active & set(seen.stacks)
    lacks: dict[int, str] = {}
    if seen.first is None:
        lacks[2] = "the order in which records reached the store"
    if hang:
        if known < seen.active:
            missing = len(seen.active) - len(known)
            lacks[7] = lacks[8] = lacks[9] = f"where {missing} of {len(seen.active)} active ranks were"
        if unknown := sorted(seen.active - seen.collectives.keys()):
            lacks[10] = f"the collectives that {len(unknown)} of {len(seen.active)} ranks entered (sequence unknown)"
    return tuple(Blind(rule, what) for rule, what in sorted(lacks.items()) if rule not in fired)
