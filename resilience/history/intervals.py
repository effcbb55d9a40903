"""What is an interval?  Something that went on for a time on one rank or node, with what it is part of."""

from __future__ import annotations

import msgspec

from resilience.core import events
from resilience.core.attribution import InterruptionRecord
from resilience.core.deadlines import limited
from resilience.core.identity import Key, Origin
from resilience.core.records import Record
from resilience.history.cycles import Cycle

Fact = str | int | float | bool
NOTED = 64  # events noted on one interval


class Noted(msgspec.Struct, frozen=True):
    """An event that has no interval of its own. at_ns: UTC."""

    event: events.Event
    at_ns: int


class Interval(msgspec.Struct, frozen=True):
    """Something that went on for a time, or an instant. Times are UTC nanoseconds.

    origin: of the record that tells the end, in the cycle that the interval belongs to. parent: what it is part of, in
    the same cycle. key and parent begin with "job" where it is part of the whole attempt instead of a cycle. outcome:
    "" of an instant, "open" where no end is on record. closed_by: "rank" or "monitor" as recorded, "call" where it was
    still open as the call ended, "reader" where no end is on record. facts: what else is known. cause: the interruption
    that a restart follows; of another node only its part of the cycle is known. previous: the same in the iteration or
    cycle before, with its cycle. each_s: for how long each rank of a node was away."""

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
        """Whether it is a part of a restart."""
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
    """Says that an interval has begun, so that what hangs in it has something to be shown under."""
    at, key = opened.start_ns, (*opened.key, "anchor")
    return Interval(f"{opened.name}.start", key, opened.key, opened.origin, at, at, facts=dict(opened.facts))


def hang(record: Record, event: events.RankFellSilent, key: Key, parent: Key) -> Interval:
    start = record.wall_ns - round(max(0.0, event.silent_for_s) * 1e9)
    facts: dict[str, Fact] = {"detector": event.limit, "timeout_s": event.allowed_s, "severity": event.severity}
    if section := limited(event.limit).section:
        facts["section"] = section
    return Interval("monitor.hang", key, parent, record.origin, start, record.wall_ns, facts=facts)


def instant(record: Record, seen: InterruptionRecord, key: Key, parent: Key, facts: dict[str, Fact]) -> Interval:
    at = record.wall_ns if seen.detected_wall_ns is None else min(seen.detected_wall_ns, record.wall_ns)
    return Interval("interruption", key, parent, record.origin, at, at, facts=facts, record=seen)
