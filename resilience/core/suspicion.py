"""When is a rank late compared with its own past, and do the others wait for it?

With a limit that has a margin, a hang costs several times the longest healthy duration. A suspicion comes soon after
the longest one (`facts.limits.Learned`), and records where the rank is while it is still there. First occurrences after
a start are slow, so they are not suspected. `core.shadow` checks these limits and reports each silence once.

If the suspect waits for nobody, the other ranks of its node are looked at too. It is ended before its limit only if the
user asked for that (`Limits.ends_suspects`), and if two looks, AGAIN seconds apart, find the same: all others wait in a
collective, and the suspect stands in the same line, outside a collective, and computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import msgspec

from resilience.core.watch import Finding, Seconds
from resilience.facts.deadlines import Start, section_of
from resilience.facts.interruptions import Frame, Hang
from resilience.facts.limits import NO_LIMIT, First, Learned, Limit, Limits


def limits_of(limits: Limits) -> Limits | None:
    """Return the limits beyond which a rank is suspected, None if no learned limit leaves room for a suspicion."""
    early = {
        name: Limit(soft=seconds)
        for name, learned in limits.learned.items()
        if (seconds := learned.suspected_s) is not None
    }
    if not early:
        return None
    sections = {section: limit for name, limit in early.items() if (section := section_of(name)) is not None}
    signs = {name: limit for name, limit in early.items() if section_of(name) is None}
    suspected: Limits = msgspec.structs.replace(Limits(sections=sections, first=_first(limits.learned)), **signs)
    return suspected


def _first(learned: Mapping[str, Learned]) -> dict[str, First]:
    return {name: First(known.first, dict.fromkeys(get_args(Start), NO_LIMIT)) for name, known in learned.items()}


AGAIN = 1.0  # seconds between two looks
STANDS: frozenset[Hang] = frozenset(("stopped", "in_kernel", "holds_gil", "on_lock", "in_call"))
"""How a rank hangs that waits for no other rank and computes nothing."""


class Suspect(msgspec.Struct, frozen=True):
    """A suspicion that lasts. began: start of the silence, in monotonic seconds. allowed: seconds after which the rank
    was suspected. hang, frame: at the last look; frame is the innermost one of the main thread. looks: number of looks
    at the suspect. look_at: when to look again, None while the others' positions are awaited, or if no look follows.
    is_confirmed: two looks found the same."""

    limit: str
    began: Seconds
    allowed: Seconds
    hang: Hang | None
    frame: Frame | None
    looks: int = 1
    look_at: Seconds | None = None
    is_confirmed: bool = False

    @property
    def waits_for_others(self) -> bool:
        """Return True if the rank itself waits in a collective, so that nothing is learned from the others."""
        return self.hang == "in_collective"


def suspected(finding: Finding, hang: Hang | None, stack: tuple[Frame, ...], began: Seconds) -> Suspect:
    """Return the suspicion after the first look. stack: of the main thread, innermost frame last. began: of the
    silence, without regard to standstills."""
    return Suspect(finding.limit, began, finding.allowed, hang, stack[-1] if stack else None)


def looked_again(suspect: Suspect, hang: Hang | None, stack: tuple[Frame, ...]) -> Suspect | None:
    """Return the suspicion after another look; None if the rank has moved."""
    if (hang, stack[-1] if stack else None) != (suspect.hang, suspect.frame):
        return None
    again: Suspect = msgspec.structs.replace(suspect, looks=suspect.looks + 1, look_at=None)
    return again


def compared(suspect: Suspect, others: Mapping[int, Hang | None], missing: int, now: Seconds) -> Suspect:
    """Return the suspicion once the others' positions are known. others: how each of them hangs, by rank; missing: how
    many have not answered."""
    is_waited_for = missing == 0 and suspect.hang in STANDS and do_all_wait(others)
    if not is_waited_for:
        changed = msgspec.structs.replace(suspect, look_at=None)
    elif suspect.looks == 1:
        changed = msgspec.structs.replace(suspect, look_at=now + AGAIN)
    else:
        changed = msgspec.structs.replace(suspect, look_at=None, is_confirmed=True)
    result: Suspect = changed
    return result


def do_all_wait(others: Mapping[int, Hang | None]) -> bool:
    """Return True if there are other ranks and all of them wait in a collective."""
    return bool(others) and all(hang == "in_collective" for hang in others.values())
