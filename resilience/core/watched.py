"""What is watched for hangs, and what does a suspicion say?  The two lines that a person reads of it."""

from __future__ import annotations

from collections.abc import Iterator

from resilience.core.events import HangSuspected, HangsWatched
from resilience.core.hangs import WORDS
from resilience.core.silences import FACTOR
from resilience.core.watch import Limit, Limits

MOST = 8  # limits that a line names
OFF = "RESILIENCE_DETECT_HANGS=0"
LONGER = "RESILIENCE_HANG_FIRST_LIMIT"


def watched(limits: Limits) -> HangsWatched:
    """Return by what a hang is noticed where these limits hold."""
    rule = limits.rule
    return HangsWatched(dict(_set(limits)), None if rule is None else rule.first, None if rule is None else rule.least)


def watched_in_words(event: HangsWatched) -> str:
    """Return one line: which limits hold, or that none does."""
    limits = [f"{name} {seconds:g} s" for name, seconds in event.limits.items()]
    more = f" and {len(limits) - MOST} more" if len(limits) > MOST else ""
    shown = ", ".join(limits[:MOST]) + more
    if event.first_s is None:
        what = f"only these limits hold: {shown}" if limits else "nothing is watched, for no limit is set"
        return f"hangs: {what}; the detection of hangs is switched off"
    line = (
        f"hangs: a rank silent for {event.first_s:g} s is ended, later after {FACTOR:g} times its longest "
        f"silence, at least {event.least_s:g} s"
    )
    return f"{line}; set: {shown}" if limits else line


def suspicion_in_words(rank: int, event: HangSuspected) -> str:
    """Return one line: who is silent, for how long, where, and what follows."""
    section = f" in section {event.kind!r}" if event.kind else ""
    where = [WORDS[event.hang]] if event.hang is not None else []
    if event.stack:
        frame = event.stack[-1]
        where.append(f"at {frame.file}:{frame.line} in {frame.function}")
    seen = f" ({', '.join(where)})" if where else ""
    return (
        f"rank {rank} shows no sign of life{section} for {event.silent_for_s:.0f} s, the longest time before was "
        f"{event.longest_s:.3g} s{seen}; it is ended after {event.allowed_s:g} s; if it is healthy, set {LONGER}, or "
        f"{OFF}"
    )


def _set(limits: Limits) -> Iterator[tuple[str, float]]:
    """Yield the limits that are set, the shorter one of soft and hard."""
    rows: list[tuple[str, Limit]] = [
        ("main thread", limits.watchdog),
        ("step", limits.step),
        ("heartbeat", limits.heartbeat),
        ("first heartbeat", limits.initial_heartbeat),
        ("outside sections", limits.out_of_section),
        *((f"section {name}", limit) for name, limit in limits.sections.items()),
    ]
    for name, limit in rows:
        seconds = limit.hard if limit.soft is None else limit.soft
        if seconds is not None:
            yield name, seconds
