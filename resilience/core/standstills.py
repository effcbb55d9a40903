"""For how long of a silence did the rank's host stand still?  A rank can show no sign of life meanwhile.

A virtual machine that is suspended or moved, or a frozen container, stops a rank and its monitor together. The monitor
notices it because it wakes up too late. The time by which it is late is subtracted from each silence around it, and no
limit counts anew: however often a host stands still, a hang is noticed once the rest of the silence exceeds its limit.
A standstill that begins while the monitor sleeps counts only from the moment when the monitor was to wake up, so the
monitor sleeps for a part of its shortest limit at most (`longest_sleep`)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

import msgspec

Seconds = float

NOTICEABLE = 0.25  # seconds: on a host that is only busy, a process rarely wakes up so late
SHARE = 0.25  # of the shortest limit: the longest sleep
REMEMBERED = 64  # standstills, the longest ones; a forgotten one counts as silence


class Standstill(msgspec.Struct, frozen=True):
    """A time in which the monitor was to run but did not. Monotonic seconds."""

    began: Seconds
    ended: Seconds


def since_standstills(standstills: Iterable[Standstill], since: Seconds) -> Seconds:
    """Return the start of a silence, later by the time in which the host stood still since then."""
    return since + sum(max(0.0, standstill.ended - max(standstill.began, since)) for standstill in standstills)


def united(standstills: Iterable[Standstill]) -> list[Standstill]:
    """Return the same time as standstills that do not overlap."""
    apart: list[Standstill] = []
    for standstill in sorted(standstills, key=lambda standstill: standstill.began):
        if apart and standstill.began <= apart[-1].ended:
            apart[-1] = Standstill(apart[-1].began, max(apart[-1].ended, standstill.ended))
        else:
            apart.append(standstill)
    return apart


def longest(standstills: Iterable[Standstill]) -> list[Standstill]:
    """Return those that are remembered, in order: many short ones must not displace a long one."""
    kept = heapq.nlargest(REMEMBERED, standstills, key=lambda standstill: standstill.ended - standstill.began)
    return sorted(kept, key=lambda standstill: standstill.began)


def longest_sleep(limits: Iterable[Seconds]) -> Seconds:
    """Return for how long a monitor may sleep that checks these limits."""
    return max(NOTICEABLE, SHARE * min(limits, default=math.inf))
