"""Which rank failed first, and why?  One short sentence about an incident, for a user at a terminal.

The verdict decides which rank is named, not the order in which ranks reported."""

from __future__ import annotations

from resilience.attribution.advice import named
from resilience.attribution.culprits import Culprit
from resilience.attribution.incident import Incident
from resilience.attribution.symptoms import CLASSES
from resilience.attribution.verdict import Verdict
from resilience.core.hang_kind import WORDS as HANGS
from resilience.facts import events
from resilience.facts.in_words import seconds
from resilience.facts.interruptions import Interruption, InterruptionRecord
from resilience.history.places import AT_ENTRY

LONGEST = 120  # characters of a cause
NOBODY = "no rank is to blame"
UNKNOWN = "which rank failed first is not known"
_OPEN = {"unknown": "", "hung": " (a rank waited, and the rank it waited for is unknown)"}
"""Classes of a verdict without a culprit although a rank failed: what is added to UNKNOWN."""


def failure_in_words(incident: Incident, has_nodes: bool = False) -> str:
    """Return which rank failed first, and why. has_nodes: name the node, because there are several."""
    verdict, chief = incident.verdict, chief_culprit(incident.verdict)
    if verdict.what == "store_lost":
        return "the job's store was lost"
    if verdict.candidates and (chief is None or verdict.first is None):
        later = named(culprit.rank for culprit in verdict.culprits)
        broke = "" if chief is None else f"; {later} broke in the restart ({cause_of(incident)})"
        return f"{UNKNOWN} (candidates: {candidates_in_words(verdict)}){broke}"
    if chief is None and verdict.what in _OPEN:
        return UNKNOWN + _OPEN[verdict.what]
    if chief is None:
        return f"{NOBODY} ({CLASSES[verdict.what]})"
    if verdict.what == "common":
        failure = f"{named(culprit.rank for culprit in verdict.culprits)} failed in the same way"
    else:
        on_node = f" on {incident.nodes[chief.rank]}" if has_nodes and chief.rank in incident.nodes else ""
        failure = f"rank {chief.rank}{on_node} failed first"
    return f"{failure} ({cause_of(incident)})"


def cause_of(incident: Incident) -> str:
    """Return what happened to the rank that is blamed, as one short line. If none of its records shows that, only the
    class is known."""
    chief = chief_culprit(incident.verdict)
    record = incident.chief if chief is None else _record_of(chief, incident)
    if record is not None:
        return cause_in_words(record)
    return "" if chief is None else CLASSES[chief.what]


def _record_of(culprit: Culprit, incident: Incident) -> InterruptionRecord | None:
    """Return the record that shows why a rank is blamed. An error that followed from the abort does not, nor that the
    rank waited for the others to complete."""
    records = (record for record in incident.records if record.rank == culprit.rank and record.origin != "consequence")
    return next(
        (record for record in records if record.detector is None or record.detector.name != "completion_barrier"), None
    )


def judged(incident: Incident, has_nodes: bool = False) -> events.IncidentJudged:
    """Return the verdict as an event. Records, spans, logs and metrics then use the same words as the terminal."""
    chief, is_launchers = chief_culprit(incident.verdict), incident.layer == "launcher"
    return events.IncidentJudged(
        failure_in_words(incident, has_nodes),
        incident.verdict.what,
        incident.cycle,
        None if is_launchers or incident.iteration == AT_ENTRY else incident.iteration,
        None if chief is None else chief.rank,
        0.0 if chief is None else chief.confidence,
        () if incident.is_judged else blamed_nodes(incident),
        None if is_launchers else incident.call,
    )


def blamed_nodes(incident: Incident) -> tuple[str, ...]:
    """Return the nodes of the blamed ranks. A common cause on several nodes blames none of them."""
    ranks = [culprit.rank for culprit in incident.verdict.culprits]
    nodes = {incident.nodes[rank] for rank in ranks if rank in incident.nodes}
    return () if incident.verdict.what == "common" and len(nodes) > 1 else tuple(sorted(nodes))


def chief_culprit(verdict: Verdict) -> Culprit | None:
    """Return the culprit that is named first, None if no rank is named."""
    return next(
        (culprit for culprit in verdict.culprits if culprit.rank == verdict.first), next(iter(verdict.culprits), None)
    )


def candidates_in_words(verdict: Verdict) -> str:
    """Return the ranks that may be to blame."""
    return named(culprit.rank for culprit in verdict.candidates)


def cause_in_words(record: InterruptionRecord) -> str:
    """Return what ended a rank's iteration, as one short line."""
    line = " ".join(_cause(record).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def _cause(record: InterruptionRecord) -> str:
    error, end, detector = record.exception, record.exit, record.detector
    if error is not None:
        return error.in_words
    if end is not None and (record.interruption is Interruption.TERMINATED or record.program_had_failed):
        ending = end.signal or ("ended" if end.code is None else f"exit code {end.code}")
        return f"{ending}, out of memory" if end.oom else ending
    if record.interruption in (Interruption.SOFT_TIMEOUT, Interruption.HARD_TIMEOUT) and detector is not None:
        limit = "" if detector.limit_s is None else f" limit {seconds(detector.limit_s)}"
        hang = "" if record.hang is None else f", {HANGS[record.hang]}"
        return f"hung: {detector.name}{limit}{hang}"
    return record.message or record.interruption.value
