"""When did what happen, and inside what?  Spans, computed from records.

`SpanView` is a fold: fed with the records of a node, in the order of each file, it answers with the
spans that became complete. It keeps state for each rank apart, so that the order between ranks does
not matter, and ids are hashes of a span's place, so that a live exporter, its successor and a replay of
the record files say exactly the same. Values only: `telemetry.sending` turns them into OpenTelemetry's.

    launcher.cycle ⊃ what `telemetry.launcher_spans` lists, and under the launcher
    inprocess.iteration ⊃ initialize, health_check, run, and on an interruption restart ⊃ the seven phases
    interruption          an instant: this rank, or its monitor, saw the fault
    monitor.hang          from the last sign of life to the limit
    <name>.start          an anchor that leaves at once, so that what hangs or dies shows while it is open

What a dead rank left open is ended by its monitor's records (`resilience.outcome` = lost,
`resilience.closed_by` = monitor). A restart reaches into the next iteration: it ends with the first
progress there. Events that belong to no span of their own are attached to the iteration's."""

from __future__ import annotations

from collections import Counter

import msgspec

from resilience.core import events, identity
from resilience.core.attribution import InterruptionRecord
from resilience.core.identity import Origin
from resilience.core.records import Record
from resilience.telemetry.launcher_spans import CycleSpans
from resilience.telemetry.span import (
    EVENTS_KEPT,
    Link,
    Span,
    SpanEvent,
    Trace,
    Value,
    cycle_span_id,
    event_of,
    exception_event,
    hang_attributes,
    interruption_attributes,
    is_sampled,
    origin_attributes,
    trace_id,
)


def iteration_span_id(origin: Origin, iteration: int, initial_rank: int) -> int:
    """Return the id of an iteration's root span, so that anyone can be its child."""
    return _id(origin, "iteration", iteration, initial_rank)


def run_span_id(origin: Origin, iteration: int, initial_rank: int) -> int:
    """Return the id of the span in which the wrapped function runs."""
    return _id(origin, "run", iteration, initial_rank, 0)


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

    parent: trace and span that everything belongs to, from TRACEPARENT. is_launched: the launcher's cycles hold
    the iterations."""

    def __init__(self, parent: Trace | None = None, is_launched: bool = False) -> None:
        self._parent = parent
        self._is_launched = is_launched
        self._cycles = CycleSpans(parent)
        self._ranks: dict[tuple[int, int, int, int | None], _Rank] = {}
        self._faulty: set[tuple[int, int]] = set()  # (call, initial rank) that had a fault of their own

    def take(self, record: Record) -> list[Span]:
        """Return the spans that this record completes."""
        event, origin = record.event, record.origin
        if origin.is_launchers:
            return self._cycles.take(record)
        match event:
            case events.CallStarted():
                self._rank(origin).initial_world = event.world_size
            case events.IterationStarted():
                return self._iteration_started(record, event)
            case events.IterationEnded():
                return self._iteration_ended(record, event)
            case events.StageStarted():
                return [*self._stage_started(record, event), *self._entered(record, event)]
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
        opened = _Open(span_id, self._root(origin), iteration, attributes)
        self._rank(origin).iterations[iteration] = opened
        return self._anchor("inprocess.iteration", opened, record)

    def _iteration_ended(self, record: Record, event: events.IterationEnded) -> list[Span]:
        origin = record.origin
        iteration, initial_rank = _place(origin)
        opened = self._rank(origin).iterations.pop(iteration, None)
        if opened is None:  # its beginning is lost
            span_id = iteration_span_id(origin, iteration, initial_rank)
            opened = _Open(span_id, self._root(origin), iteration, self._attributes(origin))
        links: tuple[Link, ...] = ()
        if iteration:
            before = iteration_span_id(origin, iteration - 1, initial_rank)
            links = (Link(trace_id(origin, self._parent), before, "previous_iteration"),)
        return self._finished("inprocess.iteration", opened, record, event.outcome, event.duration_s, event, links)

    def _stage_started(self, record: Record, event: events.StageStarted) -> list[Span]:
        opened = self._open_stage(record, event.stage)
        self._rank(record.origin).stages[event.stage] = opened
        return self._anchor(event.stage, opened, record)

    def _entered(self, record: Record, event: events.StageStarted) -> list[Span]:
        return self._cycles.entered(record) if self._is_launched and event.stage == "run" else []

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
        }
        noted = () if seen.exception is None else (SpanEvent("exception", at, exception_event(seen.exception)),)
        return [
            Span(
                name="interruption",
                trace_id=trace_id(origin, self._parent),
                span_id=_id(origin, "interruption", iteration, seen.rank, number),
                parent_id=iteration_span_id(origin, iteration, seen.rank),
                start_ns=at,
                end_ns=at,
                attributes=attributes | interruption_attributes(seen),
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
        return [
            Span(
                name="monitor.hang",
                trace_id=trace_id(origin, self._parent),
                span_id=_id(origin, "hang", iteration, initial_rank, number),
                parent_id=iteration_span_id(origin, iteration, initial_rank),
                start_ns=record.wall_ns - round(event.silent_for_s * 1e9),
                end_ns=record.wall_ns,
                attributes=self._attributes(origin) | hang_attributes(event),
                is_error=True,
            )
        ]

    def _attach(self, record: Record) -> None:
        """Note an event that has no span of its own on the iteration it happened in."""
        rank = self._ranks.get(_key(record.origin))
        opened = None if rank is None else rank.iterations.get(record.origin.iteration or 0)
        if opened is not None and len(opened.events) < EVENTS_KEPT:
            opened.events.append(event_of(record.event, record.wall_ns))

    def _root(self, origin: Origin) -> int | None:
        """What an iteration is part of."""
        if self._is_launched:
            return cycle_span_id(origin)
        return self._parent[1] if self._parent else None

    # -- shared ---------------------------------------------------------------------------------

    def _rank(self, origin: Origin) -> _Rank:
        return self._ranks.setdefault(_key(origin), _Rank())

    def _shows(self, origin: Origin) -> bool:
        """Whether this rank's spans leave: in a large world only a share of them, and the faulty ones."""
        return (origin.call, origin.initial_rank) in self._faulty or is_sampled(origin)

    def _attributes(self, origin: Origin) -> dict[str, Value]:
        rank = self._ranks.get(_key(origin))
        attributes = origin_attributes(origin, "inprocess") | {"resilience.call": origin.call}
        if origin.iteration is not None:
            attributes["resilience.iteration"] = origin.iteration
        if rank is not None and rank.initial_world is not None:
            attributes["resilience.world_size.initial"] = rank.initial_world
        return attributes


def _key(origin: Origin) -> tuple[int, int, int, int | None]:
    return origin.attempt, origin.cycle, origin.call, origin.initial_rank


def _place(origin: Origin) -> tuple[int, int]:
    return origin.iteration or 0, -1 if origin.initial_rank is None else origin.initial_rank
