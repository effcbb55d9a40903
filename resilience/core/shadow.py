"""What would these limits have done?  Weighs them without acting, so that a person can trust them first.

The same rules as for limits in force (`core.watch.exceeded`); each silence is told once."""

from __future__ import annotations

from resilience.core.watch import Finding, Limit, Limits, Observation, Seconds, exceeded, in_force

Told = frozenset[tuple[str, int]]  # limit and the beginning of the silence, in milliseconds
NOTHING: Told = frozenset()


def weigh(limits: Limits | None, seen: Observation, told: Told, now: Seconds) -> tuple[Told, tuple[Finding, ...]]:
    """Return what has been told by now, and what is new. told: from the call before."""
    if limits is None or seen.is_gone or seen.is_dismissed:
        return NOTHING, ()
    found = {
        (finding.limit, round((now - finding.silent_for) * 1000)): finding for finding in exceeded(limits, seen, now)
    }
    fresh = tuple(finding for key, finding in found.items() if key not in told)
    return frozenset(found), fresh


def _first(limits: Limits) -> list[Limit]:
    return [
        *(limit for first in limits.first.values() for limit in first.limits.values()),
        *(outside.limit for outside in limits.outside.values()),
    ]


def next_look(limits: Limits | None, seen: Observation, now: Seconds) -> Seconds | None:
    """Return when a limit could be exceeded that is not yet, at the earliest; None without limits."""
    if limits is None:
        return None
    sections = (*limits.sections.values(), *limits.warmup.values(), *_first(limits))
    opened = [limit.hard for limit in sections if limit.hard is not None]
    moments = [now + limit for limit in opened]  # a section opened in the next moment is not announced
    for _, since, limit in in_force(limits, seen):
        moments += [since + allowed for allowed in (limit.soft, limit.hard) if allowed is not None]
    return min((moment for moment in moments if moment > now), default=None)
