"""What is an interval?  An activity of one rank or node with its start, its end and its parent."""

from __future__ import annotations

import msgspec

from resilience.facts import events
from resilience.facts.deadlines import parse_limit
from resilience.facts.identity import Key, Origin
from resilience.facts.interruptions import InterruptionRecord
from resilience.facts.records import Record
from resilience.history.cycles import Cycle

Fact = str | int | float | bool
NOTED = 64  # events noted on one interval


class Noted(msgspec.Struct, frozen=True):
    """An event that has no interval of its own. at_ns: UTC."""

    event: events.Event
    at_ns: int


class Interval(msgspec.Struct, frozen=True):
    """An activity with a duration, or an instant. Times are UTC nanoseconds.

    origin: of the record of the end, in the cycle that the interval belongs to. parent: the enclosing interval, in the
    same cycle. key and parent begin with "job" if the interval belongs to the whole attempt, not to a cycle. outcome:
    "" for an instant, "open" if no end is on record. closed_by: "rank" or "monitor" as recorded, "call" if it was still
    open when the call ended, "reader" if no end is on record. facts: further known facts. cause: the interruption that
    a restart follows; for another node, only that node's part of the cycle. previous: the same interval in the previous
    iteration or cycle, with its cycle. each_s: how long ranks were away whose absence ended
    with this interval of their node."""

    name: str
    key: Key
    parent: Key | None
    origin: Origin
    start_ns: int
    end_ns: int
    outcome: str = ""
    closed_by: str = "rank"
    facts: dict[str, Fact] = {}
    record: InterruptionRecord | None = None
    noted: tuple[Noted, ...] = ()
    cause: Key | None = None
    previous: tuple[Cycle, Key] | None = None
    each_s: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def is_of_restart(self) -> bool:
        """Return True if it is part of a restart."""
        return self.parent is not None and "restart" in self.parent


class Open(msgspec.Struct):
    """An interval that has begun."""

    name: str
    key: Key
    parent: Key | None
    origin: Origin
    start_ns: int
    facts: dict[str, Fact] = {}
    noted: list[Noted] = []
    previous: tuple[Cycle, Key] | None = None
    mono_ns: int = 0  # start by the node's monotonic clock, of intervals that `closed` ends

    def closed(self, record: Record, outcome: str, closed_by: str, cause: Key | None = None) -> Interval:
        """End it with a record of its node that does not state how long it took. The clock may have been set since."""
        start_ns = record.wall_ns - max(0, record.mono_ns - self.mono_ns)
        return self.ended(self.origin, start_ns, record.wall_ns, outcome, closed_by, None, cause)

    def note(self, event: events.Event, at_ns: int) -> None:
        if len(self.noted) < NOTED:
            self.noted.append(Noted(event, at_ns))

    def ended(
        self,
        origin: Origin,
        start_ns: int,
        end_ns: int,
        outcome: str,
        closed_by: str = "rank",
        facts: dict[str, Fact] | None = None,
        cause: Key | None = None,
    ) -> Interval:
        known = self.facts | (facts or {})
        noted = tuple(self.noted)
        return Interval(
            self.name,
            self.key,
            self.parent,
            origin,
            start_ns,
            end_ns,
            outcome,
            closed_by,
            known,
            None,
            noted,
            cause,
            self.previous,
        )


def ended(
    opened: Open, record: Record, event: events.IterationEnded | events.StageEnded, cause: Key | None = None
) -> Interval:
    ago = event.ended_ago_s if isinstance(event, events.StageEnded) else 0.0
    end = record.wall_ns - round(ago * 1e9)
    start = end - round(max(0.0, event.duration_s) * 1e9)
    origin = msgspec.structs.replace(record.origin, iteration=opened.origin.iteration)
    return opened.ended(origin, start, end, event.outcome, event.closed_by, None, cause)


def anchor(opened: Open) -> Interval:
    """Return an instant that marks the start of an interval. A view can then show a hang inside an open interval."""
    at, key = opened.start_ns, (*opened.key, "anchor")
    return Interval(f"{opened.name}.start", key, opened.key, opened.origin, at, at, facts=dict(opened.facts))


def hang(record: Record, event: events.RankFellSilent, key: Key, parent: Key) -> Interval:
    start = record.wall_ns - round(max(0.0, event.silent_for_s) * 1e9)
    facts: dict[str, Fact] = {"detector": event.limit, "timeout_s": event.allowed_s, "severity": event.severity}
    if section := parse_limit(event.limit).section:
        facts["section"] = section
    return Interval("monitor.hang", key, parent, record.origin, start, record.wall_ns, facts=facts)


def instant(
    record: Record, interruption: InterruptionRecord, key: Key, parent: Key, facts: dict[str, Fact]
) -> Interval:
    at = record.wall_ns if interruption.detected_wall_ns is None else min(interruption.detected_wall_ns, record.wall_ns)
    return Interval("interruption", key, parent, record.origin, at, at, facts=facts, record=interruption)
