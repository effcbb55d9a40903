"""How do traces show a job?  With spans, a view of the intervals of `history.timeline`.

Ids are hashes of an interval's place, so a live exporter, its successor and a replay of the record files produce the
same spans. This module produces plain values; `telemetry.otlp` converts them into OpenTelemetry's.

A trace is a cycle and has one root: `launcher.cycle`, or `inprocess.call` without the launcher. `resilience.job` is a
separate trace, and each cycle links to it. A span leaves only when it ends. To make a running job visible, an anchor
(`launcher.cycle.start`, `inprocess.call.start`) leaves as soon as the root has begun."""

from __future__ import annotations

from resilience.attribution.symptoms import symptom
from resilience.facts import identity
from resilience.facts.identity import CYCLE, JOB, ROOT, Key, Origin
from resilience.facts.records import Record
from resilience.history.intervals import Fact, Interval
from resilience.history.timeline import Timeline
from resilience.telemetry.span import (
    Link,
    LinkKind,
    Span,
    SpanEvent,
    Trace,
    Value,
    event_of,
    exception_event,
    interruption_attributes,
    is_sampled,
    origin_attributes,
    place_of_rank,
    trace_id,
)

_JOB_CYCLE = -1  # represents the whole attempt in ids
_ERRORS = ("failed", "lost", "left", "exhausted")
_CONVENTIONS = {"exit_code": "process.exit.code", "function": "code.function.name"}
"""Facts with a name in OpenTelemetry's semantic conventions."""


class SpanView:
    """Converts intervals into spans.

    parent: trace and span that everything belongs to, from TRACEPARENT. is_launched: the launcher's cycles contain
    the iterations."""

    def __init__(self, parent: Trace | None = None, is_launched: bool = False) -> None:
        self._parent = parent
        self._timeline = Timeline(is_launched=is_launched)
        self._faulty: set[tuple[int, int]] = set()  # call and initial rank of ranks with a fault of their own

    def take(self, record: Record) -> list[Span]:
        """Return the spans that this record completes, according to the view's own timeline."""
        return self.spans(self._timeline.take(record))

    def left_open(self) -> list[Span]:
        """Return a span for everything without a recorded end; its outcome is "open"."""
        return self.spans(self._timeline.left_open())

    def spans(self, intervals: list[Interval]) -> list[Span]:
        """Return these intervals as spans."""
        return [self._span(interval) for interval in intervals if self._is_shown(interval)]

    def _is_shown(self, interval: Interval) -> bool:
        """Return True if the span is sent: in a large world, only a sample of ranks and those with their own fault."""
        if interval.record is not None and symptom(interval.record).is_own:  # one fault disturbs all ranks of a world
            self._faulty.add((interval.origin.call, interval.record.rank))
        if interval.name in ("interruption", "monitor.hang") or interval.key[0] in (*ROOT, *JOB):
            return True
        origin = interval.origin
        return (origin.call, origin.initial_rank) in self._faulty or is_sampled(origin)

    def _span(self, interval: Interval) -> Span:
        attributes = _attributes(interval)
        span_events = tuple(event_of(noted.event, noted.at_ns) for noted in interval.noted)
        if interval.record is not None:
            attributes |= interruption_attributes(interval.record)
            if interval.record.rank != interval.origin.initial_rank:
                placed = attributes | place_of_rank(interval.record)
                attributes = {name: value for name, value in placed.items() if value is not None}
            if interval.record.exception is not None:
                span_events += (SpanEvent("exception", interval.start_ns, exception_event(interval.record.exception)),)
        parent = None if interval.parent is None else self._id(interval.origin, interval.parent)
        return Span(
            name=interval.name,
            trace_id=self._trace(interval.origin, interval.key),
            span_id=self._id(interval.origin, interval.key),
            parent_id=self._parent[1] if parent is None and self._parent else parent,
            start_ns=interval.start_ns,
            end_ns=interval.end_ns,
            attributes=attributes,
            events=span_events,
            links=tuple(self._links(interval)),
            is_error=_is_error(interval),
        )

    def _links(self, interval: Interval) -> list[Link]:
        origin, links = interval.origin, []
        if interval.cause is not None:
            links.append(Link(trace_id(origin, self._parent), self._id(origin, interval.cause), "caused_by"))
        if interval.previous is not None:
            attempt, cycle = interval.previous[0]
            earlier = _moved(origin, attempt, cycle)
            kind: LinkKind = "previous_cycle" if interval.name == "launcher.cycle" else "previous_iteration"
            links.append(Link(trace_id(earlier, self._parent), self._id(earlier, interval.previous[1]), kind))
        if interval.name == "launcher.cycle":
            links.append(Link(self._trace(origin, JOB), self._id(origin, JOB), "job"))
        return links

    def _trace(self, origin: Origin, key: Key) -> int:
        return trace_id(origin if key[0] != JOB[0] else _moved(origin, origin.attempt, _JOB_CYCLE), self._parent)

    def _id(self, origin: Origin, key: Key) -> int:
        cycle = _JOB_CYCLE if key[0] == JOB[0] else origin.cycle
        return identity.span_id(origin.job_id, origin.attempt, cycle, *key)


def _moved(origin: Origin, attempt: int, cycle: int) -> Origin:
    return Origin(origin.job_id, origin.node, origin.role, origin.pid, attempt, cycle)


def _is_error(interval: Interval) -> bool:
    if interval.name in ("interruption", "monitor.hang"):
        return True
    if interval.name == "resilience.job":
        return interval.facts.get("exit_code") != 0 and not interval.facts.get("is_clean")
    return interval.outcome in _ERRORS


def _attributes(interval: Interval) -> dict[str, Value]:
    origin = interval.origin
    is_launchers = origin.is_launchers or interval.key[0] == CYCLE
    is_wrapped = not is_launchers and interval.name not in ("launcher.cycle", "launcher.node", "import")
    attributes = origin_attributes(origin, "inprocess" if is_wrapped else "launcher")
    if is_wrapped:
        attributes["resilience.call"] = origin.call
        if origin.iteration is not None:
            attributes["resilience.iteration"] = origin.iteration
    facts: dict[str, Fact] = interval.facts
    attributes |= {_CONVENTIONS.get(name, f"resilience.{name}"): value for name, value in facts.items()}
    if interval.outcome:
        attributes["resilience.outcome"] = interval.outcome
    if interval.closed_by != "rank":
        attributes["resilience.closed_by"] = interval.closed_by
    return attributes
