"""What does a verdict say, in sentences?  For the report, in the terminal and as a page."""

from __future__ import annotations

from resilience.attribution.advice import named
from resilience.attribution.culprits import NAMED, RULES, SURE
from resilience.attribution.evidence import RESTART_STAGES
from resilience.attribution.first_failure import candidates_in_words
from resilience.attribution.incident import Incident
from resilience.attribution.symptoms import CLASSES, Class
from resilience.core.communication import left_communication
from resilience.facts.interruptions import Interruption, InterruptionRecord


def verdict_statements(incident: Incident) -> list[str]:
    """Return what the verdict on an incident says, in one sentence or more. The first one names the culprits."""
    verdict = incident.verdict
    category = verdict.category.replace("_", " ")
    statements = []
    if verdict.what == "common":
        statements.append(f"common cause ({category}), no single rank is to blame; rule 14 {RULES[14]}")
    elif not verdict.culprits and not verdict.candidates:
        words = "the rank it waited for is unknown" if verdict.what == "hung" else CLASSES[verdict.what]
        statements.append(words if words == category else f"{words} ({category})")
    by_claim: dict[tuple[Class, float, int], list[int]] = {}
    for culprit in verdict.culprits:
        by_claim.setdefault((culprit.what, culprit.confidence, culprit.rule), []).append(culprit.rank)
    for (symptom, confidence, rule), ranks in by_claim.items():
        certainty = f"confidence {confidence:g}, rule {rule} {RULES[rule]}"
        statements.append(f"{named(ranks)}: {CLASSES[symptom]} ({category}); {certainty}")
        if confidence < SURE:
            statements.append(f"confidence below {SURE:g}: {_consequences(incident, ranks)}")
    if verdict.candidates:
        unknown = "" if verdict.culprits else "unknown; "
        statements.append(f"{unknown}candidates: {candidates_in_words(verdict)} (confidence below {NAMED:g})")
    return statements


def _consequences(incident: Incident, ranks: list[int]) -> str:
    """Return what the blame of these ranks is too weak for. `FaultCounter` reads no verdict, so it may have counted."""
    counted = {record.rank for record in incident.records if record.rank in ranks and _is_counted(record)}
    if not counted:
        return "too low to exclude a node or to count against a rank"
    return f"too low to exclude a node, but FaultCounter counts the exception against {named(counted)}"


def _is_counted(record: InterruptionRecord) -> bool:
    """Return True if a `FaultCounter` counts this record's exception: an own one, unless it left a communication call,
    or a hook after the fault raised it."""
    error = record.exception
    is_own = record.interruption is Interruption.EXCEPTION and record.origin == "own"
    return is_own and error is not None and not left_communication(error) and record.stage not in RESTART_STAGES
