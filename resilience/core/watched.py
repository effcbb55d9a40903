"""How are hangs detected, and what does a suspicion say?  Lines for the user."""

from __future__ import annotations

from collections.abc import Iterator

from resilience.core.hang_kind import WORDS
from resilience.core.silences import FACTOR, START
from resilience.core.watch import defaults, first_steps, heartbeat_limit
from resilience.facts.deadlines import INITIAL_HEARTBEAT, STEP
from resilience.facts.events import HangSuspected, HangsWatched, TimeoutsUnlearned
from resilience.facts.in_words import count, seconds
from resilience.facts.limits import NO_LIMIT, Limit, Limits

MOST = 8  # limits named in one line
OFF = "RESILIENCE_DETECT_HANGS=0"
LONGER = "RESILIENCE_HANG_FIRST_LIMIT"


def watched(limits: Limits, in_wrapper: bool = False) -> HangsWatched:
    """Return how hangs are detected under these limits. in_wrapper: in the function of a Wrapper."""
    rule = limits.rule
    first, least = (None, None) if rule is None else (rule.first, rule.least)
    return HangsWatched(dict(_set(limits)), first, least, in_wrapper, first_steps(limits))


def watched_in_words(event: HangsWatched, subject: str = "hang detection") -> str:
    """Return one line: which limits are in force, or that there are none. subject: how the line begins."""
    later = f" (after the first {count(event.first_steps, 'step')})" if event.first_steps else ""
    limits = [f"{name} {limit:g} s{later if name == STEP else ''}" for name, limit in event.limits.items()]
    more = f" and {len(limits) - MOST} more" if len(limits) > MOST else ""
    shown = ", ".join(limits[:MOST]) + more
    if event.first_s is None:
        return f"{subject}: off; {f'only these limits are in force: {shown}' if limits else 'no limit is set'}"
    least = "" if event.least_s is None else f", at least {event.least_s:g} s"
    line = (
        f"{subject}: once a rank has reported progress, {event.first_s:g} s without another report end it "
        f"({START * event.first_s:g} s before the second report); once its usual pauses are known, {FACTOR:g} × the "
        f"longest{least}"
    )
    return f"{line}; limits that are set: {shown}" if limits else line


def unlearned_in_words(event: TimeoutsUnlearned) -> str:
    """Return one line: with how many ranks learned limits hold, and that this cycle has another number."""
    least, most = event.least_world_size, event.most_world_size
    learned = count(least, "rank") if least == most else f"{least} to {most} ranks"
    return f"learned limits hold for {learned}, not for the {event.world_size} of this cycle: configured limits hold"


def suspicion_in_words(rank: int, event: HangSuspected) -> str:
    """Return one line: which rank is silent, for how long, where, and what follows."""
    section = f" in section {event.kind!r}" if event.kind else ""
    where = [WORDS[event.hang]] if event.hang is not None else []
    if event.stack:
        frame = event.stack[-1]
        where.append(f"at {frame.file}:{frame.line} in {frame.function}")
    position = f" ({', '.join(where)})" if where else ""
    before = f", the longest silence before was {seconds(event.longest_s)}" if event.longest_s else ""
    return (
        f"rank {rank} has been silent{section} for {seconds(event.silent_for_s)}{before}{position}; "
        f"it is ended after {seconds(event.allowed_s)}; if it is healthy, set {LONGER} "
        f"or {OFF}"
    )


def _set(limits: Limits) -> Iterator[tuple[str, float]]:
    """Yield the limits that are set, the soft limit if there is one."""
    first = NO_LIMIT if INITIAL_HEARTBEAT in defaults(limits) else limits.initial_heartbeat
    rows: list[tuple[str, Limit]] = [
        ("main thread", limits.watchdog),
        (STEP, limits.step),
        ("heartbeat", heartbeat_limit(limits, are_announced=False)),
        ("first heartbeat", first),
        ("outside sections", limits.out_of_section),
        *((f"section {name}", limit) for name, limit in limits.sections.items()),
    ]
    for name, limit in rows:
        limit_s = limit.hard if limit.soft is None else limit.soft
        if limit_s is not None:
            yield name, limit_s
