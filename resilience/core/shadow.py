"""What would these limits have done?  Checks limits without acting on them, so that a user can test them first.

The rules are those of limits in force (`core.watch.exceeded`). Each silence is reported once."""

from __future__ import annotations

from resilience.core.observation import Observation
from resilience.core.watch import Finding, Seconds, exceeded, in_force, last_signs
from resilience.facts.limits import Limit, Limits

Reported = frozenset[tuple[str, int]]  # reported silences: limit, and start of the silence in milliseconds
NOTHING: Reported = frozenset()


def weigh(
    limits: Limits | None, observation: Observation, reported: Reported, now: Seconds
) -> tuple[Reported, tuple[Finding, ...]]:
    """Return the silences that have been reported by now, and the new findings. reported: from the previous call."""
    if limits is None or observation.is_gone or observation.is_dismissed:
        return NOTHING, ()
    began = last_signs(limits, observation)
    findings = {
        (finding.limit, round(began.get(finding.limit, now - finding.silent_for) * 1000)): finding
        for finding in exceeded(limits, observation, now)
    }
    unreported = tuple(finding for key, finding in findings.items() if key not in reported)
    return frozenset(findings), unreported


def lasts(reported: Reported, limit: str, began: Seconds) -> bool:
    """Return True if this silence has been reported and still lasts. began: of the silence, in monotonic seconds."""
    return (limit, round(began * 1000)) in reported


def _first(limits: Limits) -> list[Limit]:
    return [
        *(limit for first in limits.first.values() for limit in first.limits.values()),
        *(outside.limit for outside in limits.outside.values()),
    ]


def next_look(limits: Limits | None, observation: Observation, now: Seconds) -> Seconds | None:
    """Return the earliest time at which another limit could be exceeded; None without limits."""
    if limits is None:
        return None
    sections = (*limits.sections.values(), *limits.warmup.values(), *_first(limits))
    opened = [limit.hard for limit in sections if limit.hard is not None]
    moments = [now + limit for limit in opened]  # a section may open at any moment, unannounced
    for _, since, limit in in_force(limits, observation):
        moments += [since + allowed for allowed in (limit.soft, limit.hard) if allowed is not None]
    return min((moment for moment in moments if moment > now), default=None)
