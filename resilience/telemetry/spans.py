"""When did what happen, and inside what?  Spans, computed from records.

`SpanView` is a fold: fed with the records of a node, in the order of each file, it answers with the
spans that became complete. It keeps state for each rank apart, so that the order between ranks does
not matter, and ids are hashes of a span's place, so that a live exporter, its successor and a replay of
the record files say exactly the same. Values only: `telemetry.setup` turns them into OpenTelemetry's.

    inprocess.iteration ⊃ initialize, health_check, run, and on an interruption restart ⊃ the seven phases
    interruption          an instant: this rank, or its monitor, saw the fault
    monitor.hang          from the last sign of life to the limit
    <name>.start          an anchor that leaves at once, so that what hangs or dies shows while it is open

What a dead rank left open is ended by its monitor's records (`resilience.outcome` = lost,
`resilience.closed_by` = monitor). A restart reaches into the next iteration: it ends with the first
progress there. Events that belong to no span of their own are attached to the iteration's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import msgspec

from resilience.core import events, identity
from resilience.core.attribution import ExceptionInfo, InterruptionRecord
from resilience.core.identity import Origin
from resilience.core.records import Record

SCOPE = "resilience"
ALL_UP_TO = 256  # ranks of a world of which every one is shown
SAMPLED = 64  # ranks shown of a larger world, beside those that were interrupted by a fault of their own
EVENTS_KEPT = 64  # events attached to one iteration

Value = str | int | float | bool
Trace = tuple[int, int]
"""Trace id and span id."""


class Link(msgspec.Struct, frozen=True):
    """Points from a span to another one."""

    trace_id: int
    span_id: int
    kind: Literal["caused_by", "previous_iteration"]


class SpanEvent(msgspec.Struct, frozen=True):
    """Something that happened within a span."""

    name: str
    at_ns: int
    attributes: dict[str, Value] = {}


class Span(msgspec.Struct, frozen=True):
    """A complete span. Times are UTC nanoseconds; lengths were measured on a monotonic clock."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]
    events: tuple[SpanEvent, ...] = ()
    links: tuple[Link, ...] = ()
    is_error: bool = False


def parse_traceparent(text: str) -> Trace | None:
    """Return trace and parent span id of a W3C `traceparent`, None if it is none.

    Source: W3C Trace Context, section 3.2."""
    parts = text.strip().split("-")
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2] or parts[0] == "ff":
        return None
    try:
        trace, span = int(parts[1], 16), int(parts[2], 16)
    except ValueError:
        return None
    return (trace, span) if trace and span else None


def iteration_span_id(origin: Origin, iteration: int, initial_rank: int) -> int:
    """Return the id of an iteration's root span, so that anyone can be its child."""
    return _id(origin, "iteration", iteration, initial_rank)


def run_span_id(origin: Origin, iteration: int, initial_rank: int) -> int:
    """Return the id of the span in which the wrapped function runs."""
    return _id(origin, "run", iteration, initial_rank, 0)


def trace_id(origin: Origin, parent: Trace | None = None) -> int:
    """Return the trace that a record belongs to: the given parent's, else that of its cycle."""
    return parent[0] if parent else identity.trace_id(origin.job_id, origin.attempt, origin.cycle)


def _id(origin: Origin, *path: object) -> int:
    return identity.span_id(origin.job_id, origin.attempt, origin.cycle, origin.call, *path)


class _Open(msgspec.Struct):
    """A span that has begun."""

    span_id: int
    parent_id: int | None
    iteration: int
    attributes: dict[str, Value]
    events: list[SpanEvent] = []


class _Rank:
    """What is known of one rank in one call."""

    def __init__(self) -> None:
        self.iterations: dict[int, _Open] = {}
        self.stages: dict[str, _Open] = {}
        self.counts: Counter[tuple[object, ...]] = Counter()
        self.first: dict[int, int] = {}  # iteration -> initial rank of the record that came first
        self.initial_world: int | None = None
        self.kind = "peer"  # why the present restart began, as far as this rank knows


class SpanView:
    """Folds records into spans.

    parent: trace and span that everything belongs to, from TRACEPARENT."""

    def __init__(self, parent: Trace | None = None) -> None:
        self._parent = parent
        self._ranks: dict[tuple[int, int, int, int | None], _Rank] = {}
        self._faulty: set[tuple[int, int]] = set()  # (call, initial rank) that had a fault of their own

    def take(self, record: Record) -> list[Span]:
        """Return the spans that this record completes."""
        event, origin = record.event, record.origin
        match event:
            case events.CallStarted():
                self._rank(origin).initial_world = event.world_size
            case events.IterationStarted():
                return self._iteration_started(record, event)
            case events.IterationEnded():
                return self._iteration_ended(record, event)
            case events.StageStarted():
                return self._stage_started(record, event)
            case events.StageEnded():
                return self._stage_ended(record, event)
            case events.Interrupted():
                return self._interrupted(record, event.record)
            case events.RankFellSilent():
                return self._fell_silent(record, event)
            case events.OutcomeSeen():
                if event.by is not None and origin.iteration is not None:
                    self._rank(origin).first[origin.iteration] = event.by
            case events.CallEnded() | events.MonitorEnded():
                self._ranks.pop(_key(origin), None)
            case _:
                self._attach(record)
        return []

    # -- iterations and stages ------------------------------------------------------------------

    def _iteration_started(self, record: Record, event: events.IterationStarted) -> list[Span]:
        origin = record.origin
        iteration, initial_rank = _place(origin)
        attributes = self._attributes(origin)
        attributes["resilience.world_size.active"] = event.active_world_size
        attributes["resilience.rank.state"] = event.state
        span_id = iteration_span_id(origin, iteration, initial_rank)
        opened = _Open(span_id, self._parent[1] if self._parent else None, iteration, attributes)
        self._rank(origin).iterations[iteration] = opened
        return self._anchor("inprocess.iteration", opened, record)

    def _iteration_ended(self, record: Record, event: events.IterationEnded) -> list[Span]:
        origin = record.origin
        iteration, initial_rank = _place(origin)
        opened = self._rank(origin).iterations.pop(iteration, None)
        if opened is None:  # its beginning is lost
            span_id = iteration_span_id(origin, iteration, initial_rank)
            opened = _Open(span_id, self._parent[1] if self._parent else None, iteration, self._attributes(origin))
        links: tuple[Link, ...] = ()
        if iteration:
            before = iteration_span_id(origin, iteration - 1, initial_rank)
            links = (Link(trace_id(origin, self._parent), before, "previous_iteration"),)
        return self._finished("inprocess.iteration", opened, record, event.outcome, event.duration_s, event, links)

    def _stage_started(self, record: Record, event: events.StageStarted) -> list[Span]:
        opened = self._open_stage(record, event.stage)
        self._rank(record.origin).stages[event.stage] = opened
        return self._anchor(event.stage, opened, record)

    def _open_stage(self, record: Record, stage: str) -> _Open:
        origin = record.origin
        rank = self._rank(origin)
        iteration, initial_rank = _place(origin)
        number = rank.counts[stage, iteration]
        rank.counts[stage, iteration] += 1
        parent_id = iteration_span_id(origin, iteration, initial_rank)
        if stage in events.PHASES and "restart" in rank.stages:
            parent_id = rank.stages["restart"].span_id
        span_id = _id(origin, stage, iteration, initial_rank, number)
        return _Open(span_id, parent_id, iteration, self._attributes(origin))

    def _stage_ended(self, record: Record, event: events.StageEnded) -> list[Span]:
        origin = record.origin
        rank = self._rank(origin)
        opened = rank.stages.pop(event.stage, None) or self._open_stage(record, event.stage)
        links: tuple[Link, ...] = ()
        if event.stage == "restart":
            opened.attributes["resilience.interruption.kind"], rank.kind = rank.kind, "peer"
            first = rank.first.get(opened.iteration)
            if first is not None and first != origin.initial_rank:
                cause = _id(origin, "interruption", opened.iteration, first, 0)
                links = (Link(trace_id(origin, self._parent), cause, "caused_by"),)
        return self._finished(event.stage, opened, record, event.outcome, event.duration_s, event, links)

    def _finished(
        self,
        name: str,
        opened: _Open,
        record: Record,
        outcome: str,
        duration: float,
        event: events.IterationEnded | events.StageEnded,
        links: tuple[Link, ...],
    ) -> list[Span]:
        origin = record.origin
        if not self._shows(origin):
            return []
        ago = event.ended_ago_s if isinstance(event, events.StageEnded) else 0.0
        end = record.wall_ns - round(ago * 1e9)
        attributes = opened.attributes | {"resilience.outcome": outcome}
        if event.closed_by != "rank":
            attributes["resilience.closed_by"] = event.closed_by
        span = Span(
            name=name,
            trace_id=trace_id(origin, self._parent),
            span_id=opened.span_id,
            parent_id=opened.parent_id,
            start_ns=end - round(max(0.0, duration) * 1e9),
            end_ns=end,
            attributes=attributes,
            events=tuple(opened.events),
            links=links,
            is_error=outcome in ("failed", "lost", "left"),
        )
        return [span]

    def _anchor(self, name: str, opened: _Open, record: Record) -> list[Span]:
        if not self._shows(record.origin):
            return []
        span = Span(
            name=f"{name}.start",
            trace_id=trace_id(record.origin, self._parent),
            span_id=_id(record.origin, "anchor", opened.span_id),
            parent_id=opened.span_id,
            start_ns=record.wall_ns,
            end_ns=record.wall_ns,
            attributes=dict(opened.attributes),
        )
        return [span]

    # -- instants -------------------------------------------------------------------------------

    def _interrupted(self, record: Record, seen: InterruptionRecord) -> list[Span]:
        origin = record.origin
        rank = self._rank(origin)
        iteration = seen.iteration if seen.iteration is not None else origin.iteration or 0
        number = rank.counts["interruption", iteration, seen.rank]
        rank.counts["interruption", iteration, seen.rank] += 1
        rank.kind = seen.interruption.value
        self._faulty.add((origin.call, seen.rank))
        at = record.wall_ns if seen.detected_wall_ns is None else min(seen.detected_wall_ns, record.wall_ns)
        name = f"{origin.cycle}.{origin.call}.{iteration}.{seen.rank}.{number}"
        attributes = self._attributes(origin) | {
            "resilience.rank.initial": seen.rank,
            "resilience.iteration": iteration,
            "resilience.interruption.id": name,
            "resilience.interruption.kind": seen.interruption.value,
        }
        if seen.detector is not None:
            attributes["resilience.detector"] = seen.detector.name
            if seen.detector.limit_s is not None:
                attributes["resilience.timeout_s"] = seen.detector.limit_s
        if seen.open_sections:
            attributes["resilience.section"] = seen.open_sections[-1].name
        if seen.step is not None:
            attributes["resilience.step"] = seen.step
        noted: tuple[SpanEvent, ...] = ()
        if seen.exception is not None:
            attributes["error.type"] = seen.exception.type
            noted = (SpanEvent("exception", at, _exception(seen.exception)),)
        elif seen.exit is not None:
            attributes["error.type"] = seen.exit.signal or f"exit code {seen.exit.code}"
        return [
            Span(
                name="interruption",
                trace_id=trace_id(origin, self._parent),
                span_id=_id(origin, "interruption", iteration, seen.rank, number),
                parent_id=iteration_span_id(origin, iteration, seen.rank),
                start_ns=at,
                end_ns=at,
                attributes=attributes,
                events=noted,
                is_error=True,
            )
        ]

    def _fell_silent(self, record: Record, event: events.RankFellSilent) -> list[Span]:
        origin = record.origin
        iteration, initial_rank = _place(origin)
        rank = self._rank(origin)
        number = rank.counts["hang", iteration]
        rank.counts["hang", iteration] += 1
        attributes = self._attributes(origin) | {
            "resilience.detector": event.limit,
            "resilience.timeout_s": event.allowed_s,
            "resilience.severity": event.severity,
        }
        if event.limit.startswith("section:"):
            attributes["resilience.section"] = event.limit.removeprefix("section:")
        return [
            Span(
                name="monitor.hang",
                trace_id=trace_id(origin, self._parent),
                span_id=_id(origin, "hang", iteration, initial_rank, number),
                parent_id=iteration_span_id(origin, iteration, initial_rank),
                start_ns=record.wall_ns - round(event.silent_for_s * 1e9),
                end_ns=record.wall_ns,
                attributes=attributes,
                is_error=True,
            )
        ]

    def _attach(self, record: Record) -> None:
        """Note an event that has no span of its own on the iteration it happened in."""
        rank = self._ranks.get(_key(record.origin))
        opened = None if rank is None else rank.iterations.get(record.origin.iteration or 0)
        if opened is not None and len(opened.events) < EVENTS_KEPT:
            fields = msgspec.to_builtins(record.event)
            name = fields.pop("event")
            values = {
                f"resilience.{key}": value if isinstance(value, (str, int, float, bool)) else str(value)
                for key, value in fields.items()
            }
            opened.events.append(SpanEvent(name, record.wall_ns, values))

    # -- shared ---------------------------------------------------------------------------------

    def _rank(self, origin: Origin) -> _Rank:
        return self._ranks.setdefault(_key(origin), _Rank())

    def _shows(self, origin: Origin) -> bool:
        """Whether this rank's spans leave: in a large world only a share of them, and the faulty ones."""
        size, rank = origin.world_size or 0, origin.initial_rank
        if size <= ALL_UP_TO or rank is None or (origin.call, rank) in self._faulty:
            return True
        return identity.span_id(origin.job_id, 0, 0, "sampled", rank) % math.ceil(size / SAMPLED) == 0

    def _attributes(self, origin: Origin) -> dict[str, Value]:
        rank = self._ranks.get(_key(origin))
        found: Mapping[str, Value | None] = {
            "resilience.job.id": origin.job_id,
            "resilience.layer": "inprocess",
            "resilience.attempt": origin.attempt,
            "resilience.cycle": origin.cycle,
            "resilience.call": origin.call,
            "resilience.iteration": origin.iteration,
            "resilience.rank.initial": origin.initial_rank,
            "resilience.rank.active": origin.rank,
            "resilience.world_size": origin.world_size,
            "resilience.world_size.initial": rank.initial_world if rank is not None else None,
            "resilience.role": origin.role,
            "host.name": origin.node,
            "process.pid": origin.pid,
        }
        return {name: value for name, value in found.items() if value is not None}


def _key(origin: Origin) -> tuple[int, int, int, int | None]:
    return origin.attempt, origin.cycle, origin.call, origin.initial_rank


def _place(origin: Origin) -> tuple[int, int]:
    return origin.iteration or 0, -1 if origin.initial_rank is None else origin.initial_rank


def _exception(error: ExceptionInfo) -> dict[str, Value]:
    """Source: OpenTelemetry semantic conventions for exceptions on spans."""
    lines = [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in error.stack]
    trace = "\n".join(["Traceback (most recent call last):", *lines, f"{error.type}: {error.message}"])
    return {
        "exception.type": error.type,
        "exception.message": error.message,
        "exception.stacktrace": trace,
        "resilience.fingerprint": error.fingerprint,
    }
