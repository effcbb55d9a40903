"""Which rank caused the interruption?  The attribution rules, applied to all evidence of one interruption.

Each rank with a record has a symptom (`attribution.symptoms`). The rules compare the ranks: which ones only reported
another rank's fault, which rank waited for which, what all had in common. The verdict names the place of the symptom,
not a cause in hardware; "unknown" is a valid verdict. The rule numbers are those of docs/account.md. Rules that could
not run are listed with the data they lack.

The rules about a rank for which others waited are in `attribution.awaited`, and the rule about hangs that another
rank's end does not explain is in `attribution.reach`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from types import MappingProxyType

import msgspec

from resilience.attribution.awaited import HANGS, awaited_ranks, named_by, walk_of
from resilience.attribution.culprits import NAMED, SURE, UNSURE, Culprit
from resilience.attribution.evidence import (
    RESTART_STAGES,
    Evidence,
    arrival,
    broken_in_restart,
    corrected,
    symptoms_of,
    waits,
    without_restart,
)
from resilience.attribution.reach import OwnHangs, began_out_of_reach, is_before, own_hangs
from resilience.attribution.stops import follows, without_stops
from resilience.attribution.symptoms import (
    Class,
    Symptom,
    category,
    gives_up,
    is_inside,
    main_stack,
)
from resilience.facts.in_words import count
from resilience.facts.interruptions import Category, Interruption
from resilience.facts.user_frames import user_frame

SHORTEST_TIMEOUT_S = 1.0  # of a process group: no job waits less for a collective
WITHIN_LIMITS = "stayed within the limits"  # cleared because nothing else is on record
_CATEGORIES: Mapping[Class, Category] = {
    "stopped": "host",
    "blocked_in_kernel": "storage",
    "input_stall": "storage",
    "storage_stall": "storage",
}


class Exonerated(msgspec.Struct, frozen=True):
    """Ranks that are not to blame, and why."""

    ranks: tuple[int, ...]
    reason: str


class Blind(msgspec.Struct, frozen=True):
    """A rule that could not run, and what it lacks."""

    rule: int
    lacks: str


class Verdict(msgspec.Struct, frozen=True):
    """Which ranks are to blame, for what, and by which rules. first: the first mover's initial rank, None if it is not
    known, as where culprits broke only in the restart and one of the candidates began it. candidates: ranks that may be
    to blame, with too little confidence to be named; if there are only candidates, `what` is unknown."""

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
        """Return the culprits on which a decision may act: to exclude a node, or count a fault against a rank."""
        return tuple(culprit for culprit in self.culprits if culprit.confidence >= SURE)

    @property
    def first_blamed(self) -> int | None:
        """The first culprit, None if no rank is blamed. `first` may be a rank that only reported the interruption."""
        ranks = [culprit.rank for culprit in self.culprits]
        return self.first if self.first in ranks else next(iter(ranks), None)


def judge(evidence: Evidence) -> Verdict:
    """Return which ranks are to blame for an interruption."""
    evidence = corrected(evidence)
    in_restart = broken_in_restart(evidence)
    if not in_restart:
        return _judged(evidence)
    verdict = _judged(without_restart(evidence, in_restart.keys()), without_stops(evidence, in_restart))
    return verdict if verdict.culprits else _unsure(_judged(evidence, began=verdict.candidates))


def _unsure(verdict: Verdict) -> Verdict:
    """Return the verdict with little confidence: it names ranks that broke in the restart, and nothing says which rank
    began it."""
    culprits = tuple(
        msgspec.structs.replace(culprit, confidence=min(culprit.confidence, NAMED)) for culprit in verdict.culprits
    )
    return msgspec.structs.replace(verdict, culprits=culprits)


def _judged(
    evidence: Evidence, in_restart: Mapping[int, Symptom] = MappingProxyType({}), began: tuple[Culprit, ...] = ()
) -> Verdict:
    """Return the verdict on these records. in_restart: ranks that broke later, which are to blame too if it is their
    own fault. began: candidates for the beginning, if the records are also of ranks that broke later."""
    symptoms = without_stops(evidence, _without_consequences(_without_lost_monitors(symptoms_of(evidence))))
    verdict = _named(_store_lost(evidence) or _common(evidence, symptoms) or _culprits(evidence, symptoms))
    first = verdict.first
    if first is None and verdict.culprits:
        first = verdict.culprits[0].rank
    if verdict.culprits:
        symptoms |= {rank: follows(late, _consequence(late)) for rank, late in in_restart.items() if late.rule == 2}
        symptoms |= {rank: late for rank, late in in_restart.items() if not late.is_own}
        broken = [late for late in in_restart.values() if late.is_own and late.rule != 2 and late.rank != first]
        later = tuple(Culprit(late.rank, late.what, late.confidence, late.rule) for late in broken)
        verdict = _named(msgspec.structs.replace(verdict, culprits=verdict.culprits + later))
    suspects = {culprit.rank for culprit in (*verdict.culprits, *verdict.candidates)}
    if others := tuple(candidate for candidate in began if candidate.rank not in suspects):
        first, verdict = None, msgspec.structs.replace(verdict, candidates=verdict.candidates + others)
    guilty = {culprit.rank for culprit in (*verdict.culprits, *verdict.candidates)}
    reported = [symptom.rank for symptom in symptoms.values() if symptom.rank not in guilty]
    return msgspec.structs.replace(
        verdict,
        first=evidence.first if first is None and not verdict.candidates else first,
        cascade=tuple(sorted(reported)) if verdict.what != "store_lost" else (),
        exonerated=_exonerated(evidence, symptoms, guilty, verdict),
        rules_blind=_blind(evidence, verdict.rules_fired),
    )


def _named(verdict: Verdict) -> Verdict:
    """Return the verdict with culprits of too little confidence as candidates only."""
    named = tuple(culprit for culprit in verdict.culprits if culprit.confidence >= NAMED)
    if len(named) == len(verdict.culprits):
        return verdict
    candidates = tuple(culprit for culprit in verdict.culprits if culprit.confidence < NAMED)
    if named:
        return msgspec.structs.replace(verdict, culprits=named, candidates=verdict.candidates + candidates)
    return Verdict("unknown", "unknown", candidates=candidates, rules_fired=verdict.rules_fired)


def _without_lost_monitors(symptoms: dict[int, Symptom]) -> dict[int, Symptom]:
    """Return the symptoms. If any rank has a fault or a hang, a lost monitor is not a fault of its rank."""
    if not any(
        symptom.what != "monitor_lost" and (symptom.is_own or symptom.what == "hung") for symptom in symptoms.values()
    ):
        return symptoms
    reason = "only its monitor was lost, which interrupts no rank"
    return {
        rank: follows(symptom, reason) if symptom.what == "monitor_lost" else symptom
        for rank, symptom in symptoms.items()
    }


def _without_consequences(symptoms: dict[int, Symptom]) -> dict[int, Symptom]:
    """Return the symptoms. If a rank has a fault of its own, ranks that give up only follow it, and so do ranks whose
    hooks fail in the restart."""
    reasons = {
        rank: reason for rank, symptom in symptoms.items() if symptom.rule == 2 and (reason := _consequence(symptom))
    }
    if not any(symptom.is_own and rank not in reasons for rank, symptom in symptoms.items()):
        return symptoms
    return {rank: follows(symptom, reasons[rank]) if rank in reasons else symptom for rank, symptom in symptoms.items()}


def _consequence(symptom: Symptom) -> str:
    """Return why an error may follow from another rank's fault, "" if nothing says so."""
    if gives_up(symptom.record):
        return "gave up after another rank's fault"
    if symptom.record.stage in RESTART_STAGES:
        return "its hook failed in the restart after another rank's fault"
    return ""


def _store_lost(evidence: Evidence) -> Verdict | None:
    ranks = max(len(evidence.active | evidence.inactive), evidence.world or 0)
    if len(evidence.store_lost) * 2 <= ranks or not evidence.store_lost:
        return None
    return Verdict("store_lost", "host", rules_fired=(16,))


def _common(evidence: Evidence, symptoms: Mapping[int, Symptom]) -> Verdict | None:
    """Rule 14: most active ranks show the same symptom, and so does the first rank if it had a fault of its own."""
    if len(evidence.active) < 2:
        return None
    first_own = {rank for rank, symptom in symptoms.items() if symptom.is_own and rank == evidence.first}
    groups: defaultdict[tuple[object, ...], list[Symptom]] = defaultdict(list)
    for own in symptoms.values():
        if own.is_own and own.rank in evidence.active:
            groups[_likeness(own)].append(own)
    for alike in groups.values():
        # Ranks that ended quietly may all have given up because of one rank that did not.
        least = evidence.count - 1 if alike[0].is_quiet else evidence.count // 2
        is_most = len(alike) > 1 and len(alike) > least
        if is_most and first_own <= {symptom.rank for symptom in alike}:
            culprits = tuple(Culprit(symptom.rank, symptom.what, 0.5, 14) for symptom in alike)
            first = evidence.first if evidence.first in {symptom.rank for symptom in alike} else None
            return Verdict("common", category(alike[0]), first, culprits, rules_fired=(alike[0].rule, 14))
    return None


def _likeness(symptom: Symptom) -> tuple[object, ...]:
    record = symptom.record
    if record.exception is not None:
        return symptom.what, record.exception.fingerprint
    leaf = user_frame(main_stack(record))
    place = None if leaf is None else (leaf.file, leaf.function)
    return symptom.what, record.exit and (record.exit.signal, record.exit.code), place


def _culprits(evidence: Evidence, symptoms: Mapping[int, Symptom]) -> Verdict:
    shown = [symptom for symptom in symptoms.values() if symptom.is_own and not symptom.is_guess]
    faults = [symptom for symptom in shown if not symptom.is_quiet]
    quiet = [symptom for symptom in shown if symptom.is_quiet]
    exits = [symptom for symptom in faults if symptom.rule == 1]
    raised = [symptom for symptom in faults if symptom.rule == 2]
    hung = [symptom for symptom in faults if symptom.rule not in (1, 2)]
    blamed: list[Culprit] = []
    if raised:
        blamed += _blame_raised(evidence, raised, alone=not exits and not hung)
    # No other rank kills or crashes a process: whatever else happened, this is a fault of its own.
    blamed += [Culprit(symptom.rank, symptom.what, symptom.confidence, 1) for symptom in exits]
    own = own_hangs(evidence, hung, [*raised, *exits, *quiet]) if blamed else OwnHangs()
    if hung and (not blamed or evidence.first in {symptom.rank for symptom in hung}):
        blamed += _blame_hung(evidence, hung)
    elif own.older or own.later:
        blamed += _blame_hung(evidence, [*own.older, *own.later])
    fired = {culprit.rule for culprit in blamed} | {symptom.rule for symptom in symptoms.values() if not symptom.is_own}
    blamed += [Culprit(symptom.rank, symptom.what, UNSURE, 11) for symptom in own.unsure if not own.older]
    fired |= {11} if own.older or own.later or own.unsure else set()
    if quiet:
        blamed += _blame_quiet(evidence, symptoms, quiet, {culprit.rank for culprit in blamed})
        fired |= {culprit.rule for culprit in blamed}
    if not blamed:
        blamed, what, rules = awaited_ranks(evidence, symptoms)
        fired |= rules
        if all(culprit.confidence < NAMED for culprit in blamed):  # then these errors may be the ranks' own as well
            known = {culprit.rank for culprit in blamed}
            unblamed = [symptom for symptom in symptoms.values() if symptom.rank not in known]
            guesses = [symptom for symptom in unblamed if _may_be_own(evidence, symptom)]
            blamed = [Culprit(symptom.rank, symptom.what, UNSURE, 2) for symptom in guesses] + blamed
            fired |= {2} if guesses else set()
        if not blamed:
            return Verdict(what, "unknown", rules_fired=tuple(sorted(fired)))
        return Verdict(
            blamed[0].what, _category(blamed[0], {}), culprits=tuple(blamed), rules_fired=tuple(sorted(fired))
        )

    older, later = {symptom.rank for symptom in own.older}, {symptom.rank for symptom in own.later}

    def order(culprit: Culprit) -> tuple[bool, int, bool, float, float, int]:
        rank, confidence = culprit.rank, culprit.confidence
        position = arrival(symptoms[rank].record) if rank in symptoms else float("inf")
        place = (rank not in older) + (rank in later)
        return confidence < NAMED, place, rank != evidence.first, position, -confidence, rank

    blamed.sort(key=order)
    chief = blamed[0]
    return Verdict(chief.what, _category(chief, symptoms), culprits=tuple(blamed), rules_fired=tuple(sorted(fired)))


def _may_be_own(evidence: Evidence, symptom: Symptom) -> bool:
    """Return True if an error of a communication call may be the rank's own: a wrapper has settled that, or there is
    none and this rank ended first."""
    is_undecided = symptom.rule == 2 and not symptom.is_own and symptom.record.origin is None
    return symptom.is_guess or (is_undecided and symptom.rank == evidence.first)


def _category(culprit: Culprit, symptoms: Mapping[int, Symptom]) -> Category:
    """Return the category of a culprit. A rank without a symptom was alive, but elsewhere."""
    shown = symptoms.get(culprit.rank)
    is_of_record = shown is not None and shown.what == culprit.what
    return category(shown) if shown is not None and is_of_record else _CATEGORIES.get(culprit.what, "user_code")


def _blame_quiet(
    evidence: Evidence, symptoms: Mapping[int, Symptom], quiet: list[Symptom], blamed: Set[int]
) -> list[Culprit]:
    """Rule 1: blame the ranks that ended without giving a reason. If another rank's fault may explain such an end, the
    rank is only a candidate, and so is the other rank. blamed: ranks with another fault of their own."""
    others: list[Culprit] = []
    waited = _waits_before_ends(evidence, quiet)
    if not blamed and any(_only_waited(symptom) for symptom in (*symptoms.values(), *waited.values())):
        others, _, _ = awaited_ranks(evidence, {**symptoms, **waited})
    if not blamed and not others:
        others = [Culprit(rank, "hung", UNSURE, 7) for rank in _may_have_been_awaited(evidence, symptoms, quiet)]
    # If a rank's program had failed while others still waited, that is why they waited.
    failed = {symptom.rank for symptom in quiet if symptom.record.program_had_failed}
    if failed:
        others = [other for other in others if other.rank not in failed and not waits(evidence, other.rank)]
    ranks = blamed | {symptom.rank for symptom in quiet}
    # The earliest first: the comparison with it settles the question for all others.
    faults = sorted(
        (symptom for symptom in symptoms.values() if symptom.rank in ranks),
        key=lambda symptom: symptom.record.detected_wall_ns or 0,
    )
    awaited = {culprit.rank for culprit in others}
    culprits = []
    for symptom in quiet:
        if symptom.rank in awaited:
            continue  # the others waited for it before it ended
        is_first = all(
            is_before(evidence, symptom, other) or began_out_of_reach(evidence, other, symptom)
            for other in faults
            if other is not symptom
        )
        confidence = symptom.confidence if is_first and not others else UNSURE
        culprits.append(Culprit(symptom.rank, symptom.what, confidence, 1))
    return culprits + others


def _only_waited(symptom: Symptom) -> bool:
    return symptom.what == "hung" and not symptom.is_own


def _waits_before_ends(evidence: Evidence, quiet: list[Symptom]) -> dict[int, Symptom]:
    """Return the symptoms of ranks that had only waited for another one, past a limit, before they ended quietly."""
    records = tuple(record for record in evidence.records if record.interruption is not Interruption.TERMINATED)
    before = symptoms_of(msgspec.structs.replace(evidence, records=records))
    ended = {symptom.rank for symptom in quiet}
    return {rank: symptom for rank, symptom in before.items() if rank in ended and _only_waited(symptom)}


def _may_have_been_awaited(evidence: Evidence, symptoms: Mapping[int, Symptom], quiet: list[Symptom]) -> list[int]:
    """Return the ranks for which ranks that ended quietly may have waited until the timeout of a collective."""
    ended = {symptom.rank for symptom in quiet}
    if len(ended) > 1 and len(ended) * 2 > evidence.count:
        return sorted(evidence.active - set(symptoms))
    ages = [symptom.record.last_heartbeat_age_s for symptom in quiet]
    if all(age is not None and age < SHORTEST_TIMEOUT_S for age in ages):
        return []
    elsewhere = [
        rank
        for rank in sorted(evidence.active - set(symptoms))
        if is_inside(evidence.stacks.get(rank, ())) and not waits(evidence, rank)
    ]
    return elsewhere if len(elsewhere) * 2 <= len(evidence.active) else []  # else they only compute


def _blame_hung(evidence: Evidence, hung: list[Symptom]) -> list[Culprit]:
    """Blame the ranks that hang by themselves, with more confidence if the others wait for one rank alone. A rank that
    is only in a call may wait in it for a rank that cannot run: then it is a candidate."""
    reporters = {symptom.rank for symptom in hung}
    held = {
        rank: HANGS[word]
        for rank, word in sorted(evidence.hangs.items())
        if word in ("stopped", "holds_gil") and rank in evidence.active - reporters
    }
    if held and all(symptom.what == "hung" and symptom.record.hang in (None, "in_call") for symptom in hung):
        named, _, _ = named_by(held, 0.7)
        return named + [Culprit(symptom.rank, symptom.what, UNSURE, symptom.rule) for symptom in hung]
    awaited = walk_of(evidence).awaited
    return [
        Culprit(
            symptom.rank,
            symptom.what,
            max(symptom.confidence, SURE if awaited == (symptom.rank,) else 0.0),
            symptom.rule,
        )
        for symptom in hung
    ]


def _blame_raised(evidence: Evidence, raised: list[Symptom], alone: bool) -> list[Culprit]:
    """Rule 2: blame the exceptions known to be the ranks' own, and the one that reached the store first. If neither is
    known, blame each rank with low confidence."""
    ordered = [symptom for symptom in raised if symptom.record.arrival_order is not None]
    first = [symptom for symptom in raised if symptom.rank == evidence.first] or ordered[:1]
    known = first[:1] + [symptom for symptom in raised if symptom.record.origin == "own" and symptom not in first[:1]]
    if known:
        return [Culprit(symptom.rank, symptom.what, symptom.confidence, 2) for symptom in known]
    if not alone:
        return []
    confidence = 0.8 if len(raised) == 1 else 0.4
    return [Culprit(symptom.rank, symptom.what, confidence, 2) for symptom in raised]


def _exonerated(
    evidence: Evidence, symptoms: Mapping[int, Symptom], guilty: set[int], verdict: Verdict
) -> tuple[Exonerated, ...]:
    reasons: defaultdict[str, list[int]] = defaultdict(list)
    for rank in sorted(evidence.active | evidence.inactive | set(symptoms)):
        if rank in guilty:
            continue
        symptom = symptoms.get(rank)
        if symptom is not None and symptom.reason:
            reasons[symptom.reason].append(rank)
        elif symptom is not None:
            reasons["failed after the interruption had begun"].append(rank)
        elif rank in evidence.on_lost_node:
            reasons["was lost with its node"].append(rank)
        elif rank in evidence.inactive:
            reasons["was a spare"].append(rank)
        elif rank in evidence.returned:
            reasons["had completed"].append(rank)
        elif waits(evidence, rank):
            reasons["waited in a collective for another rank"].append(rank)
        elif verdict.what == "store_lost" or rank == evidence.first:
            continue
        elif guilty or (symptoms and _is_located(evidence, rank)):
            reasons[WITHIN_LIMITS].append(rank)
    return tuple(Exonerated(tuple(ranks), reason) for reason, ranks in reasons.items())


def _is_located(evidence: Evidence, rank: int) -> bool:
    """Return True if anything shows where a rank was. Otherwise the others may have waited for it."""
    return rank in evidence.stacks or rank in evidence.hangs or rank in evidence.collectives


def _blind(evidence: Evidence, fired: tuple[int, ...]) -> tuple[Blind, ...]:
    hang = any(
        record.interruption in (Interruption.SOFT_TIMEOUT, Interruption.HARD_TIMEOUT) for record in evidence.records
    )
    known = evidence.active & set(evidence.stacks)
    lacks: dict[int, str] = {}
    if evidence.first is None:
        lacks[2] = "the order in which records reached the store"
    if hang:
        if len(known) < evidence.count:
            missing = evidence.count - len(known)
            lacks[7] = lacks[8] = lacks[9] = f"where {missing} of {count(evidence.count, 'active rank')} were"
        if unknown := evidence.count - len(evidence.active & evidence.collectives.keys()):
            some = f"{unknown} of {count(evidence.count, 'rank')}"
            lacks[10] = f"the collectives that {some} entered (sequence unknown)"
    return tuple(Blind(rule, what) for rule, what in sorted(lacks.items()) if rule not in fired)
