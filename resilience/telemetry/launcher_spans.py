"""What did the launcher do when, and inside what?  Spans of cycles, computed from records.

    resilience.job        a trace of its own, unless TRACEPARENT gives one; each cycle is linked to it
    launcher.cycle ⊃ gate, rendezvous, spawn, run, stop
                     import (a worker, from its start to its first sign, or until its wrapped function is entered)
    interruption, monitor.hang   what a worker's monitor, or the agent, saw

A part of `telemetry.spans.SpanView`, with the same rules: a fold, ids that are hashes of a span's place, an anchor
for what is open. Gate and rendezvous come before it is known which cycle they lead to: they leave with its
beginning. Each node has a `launcher.cycle` of its own in the cycle's trace."""

from __future__ import annotations

from collections import Counter, defaultdict

import msgspec

from resilience.core import events, identity
from resilience.core.attribution import InterruptionRecord
from resilience.core.identity import Origin
from resilience.core.records import Record
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

_BEFORE = ("gate", "rendezvous")
_Worker = tuple[int, int, int]
"""Attempt, cycle and rank."""


class _Node:
    """What is known of one node's agent."""

    def __init__(self) -> None:
        self.began_ns: int | None = None  # UTC, of the attempt
        self.attempt = 0
        self.why = ""
        self.met: events.RendezvousCompleted | None = None
        self.noted: list[SpanEvent] = []
        self.before: list[Record] = []


class CycleSpans:
    """Folds the launcher's records into spans. parent: as for `SpanView`."""

    def __init__(self, parent: Trace | None) -> None:
        self._parent = parent
        self._nodes: defaultdict[str, _Node] = defaultdict(_Node)
        self._counts: Counter[tuple[object, ...]] = Counter()
        self._started: dict[_Worker, Record] = {}
        self._entered: dict[_Worker, Record] = {}

    def take(self, record: Record) -> list[Span]:
        """Return the spans that this record completes."""
        if isinstance(record.event, events.Interrupted):
            return [self._interrupted(record, record.event.record)]
        return self._of_agent(record) if record.origin.role == "agent" else self._of_monitor(record)

    # -- agents ---------------------------------------------------------------------------------

    def _of_agent(self, record: Record) -> list[Span]:
        event, origin = record.event, record.origin
        node = self._nodes[origin.node]
        if node.began_ns is None or node.attempt != origin.attempt:
            node.began_ns, node.attempt = record.wall_ns, origin.attempt
        match event:
            case events.CyclePhaseStarted(phase):
                return [self._anchor(record, phase)]
            case events.CyclePhaseEnded(phase) if phase in _BEFORE:
                node.before.append(record)
            case events.CyclePhaseEnded():
                return [self._phase(record, event, origin)]
            case events.CycleStarted(why):
                before, node.before, node.why = node.before, [], why
                node.noted.append(event_of(event, record.wall_ns))
                return [*self._phases(before, origin), self._anchor(record, "launcher.cycle")]
            case events.CycleEnded():
                return [self._cycle_ended(record, event, node)]
            case events.JobEnded():
                before, node.before = node.before, []
                return [*self._phases(before, origin), self._job_ended(record, event, node.began_ns)]
            case events.WorkerStarted(worker_rank=rank):
                place = (origin.attempt, origin.cycle, rank)
                self._started.setdefault(place, record)
                self._note(node, record)
                return self._imported(place)
            case _:
                node.met = event if isinstance(event, events.RendezvousCompleted) else node.met
                self._note(node, record)
        return []

    def _note(self, node: _Node, record: Record) -> None:
        if len(node.noted) < EVENTS_KEPT:
            node.noted.append(event_of(record.event, record.wall_ns))

    def _phases(self, records: list[Record], origin: Origin) -> list[Span]:
        """Those that led to the cycle of `origin`."""
        return [
            self._phase(record, record.event, origin)
            for record in records
            if isinstance(record.event, events.CyclePhaseEnded)
        ]

    def _phase(self, record: Record, event: events.CyclePhaseEnded, origin: Origin) -> Span:
        return self._span(
            event.phase,
            origin,
            (event.phase,),
            record.wall_ns,
            event.duration_s,
            self._attributes(origin) | {"resilience.outcome": event.outcome},
            is_error=event.outcome in ("failed", "lost"),
        )

    def _cycle_ended(self, record: Record, event: events.CycleEnded, node: _Node) -> Span:
        origin = record.origin
        attributes = self._attributes(origin) | {"resilience.outcome": event.outcome, "resilience.why": node.why}
        if event.detail:
            attributes["resilience.detail"] = event.detail
        if node.met is not None:
            attributes["resilience.world_size"] = node.met.world_size
            attributes["resilience.nodes"] = node.met.nodes
        span = self._span(
            "launcher.cycle",
            origin,
            (),
            record.wall_ns,
            event.duration_s,
            attributes,
            tuple(node.noted),
            is_error=event.outcome in ("failed", "exhausted"),
        )
        node.noted, node.met, node.why = [], None, ""
        node.began_ns = span.start_ns if node.began_ns is None else min(node.began_ns, span.start_ns)
        link = Link(self._job_trace(origin), _job_span(origin), "job")
        return msgspec.structs.replace(
            span, span_id=cycle_span_id(origin), parent_id=self._parent[1] if self._parent else None, links=(link,)
        )

    def _job_ended(self, record: Record, event: events.JobEnded, began_ns: int | None) -> Span:
        origin = record.origin
        attributes = self._attributes(origin) | {
            "resilience.outcome": event.outcome,
            "resilience.exit_code": event.exit_code,
        }
        return Span(
            name="resilience.job",
            trace_id=self._job_trace(origin),
            span_id=_job_span(origin),
            parent_id=self._parent[1] if self._parent else None,
            start_ns=record.wall_ns if began_ns is None else min(began_ns, record.wall_ns),
            end_ns=record.wall_ns,
            attributes=attributes,
            is_error=event.exit_code != 0 and not event.is_clean,
        )

    def _anchor(self, record: Record, name: str) -> Span:
        return self._span(
            f"{name}.start", record.origin, ("anchor", name), record.wall_ns, 0.0, self._attributes(record.origin)
        )

    # -- monitors -------------------------------------------------------------------------------

    def _of_monitor(self, record: Record) -> list[Span]:
        event, origin = record.event, record.origin
        attributes = self._attributes(origin)
        match event:
            case events.RankFellSilent():
                name = ("hang", origin.initial_rank)
                attributes |= hang_attributes(event)
                silent = event.silent_for_s
                return [self._span("monitor.hang", origin, name, record.wall_ns, silent, attributes, is_error=True)]
            case events.WorkerProgressed() if is_sampled(origin):
                place = ("import", origin.attempt, origin.cycle, origin.initial_rank)
                self._counts[place] += 1
                if self._counts[place] == 1 and place[1:] not in self._entered:
                    end = record.wall_ns - round(event.ago_s * 1e9)
                    attributes["resilience.sign"] = event.sign
                    return [
                        self._span("import", origin, ("import", origin.initial_rank), end, event.after_s, attributes)
                    ]
        return []

    # -- workers --------------------------------------------------------------------------------

    def entered(self, record: Record) -> list[Span]:
        """A worker's program entered a wrapped function: from then on the Wrapper's monitor hears its signs.

        The agent's record of its start and this one may come in either order."""
        origin = record.origin
        rank = -1 if origin.initial_rank is None else origin.initial_rank
        place = (origin.attempt, origin.cycle, rank)
        told = ("import", *place)
        if place in self._entered or self._counts[told] or not is_sampled(origin):
            return []
        self._entered[place] = record
        return self._imported(place)

    def _imported(self, place: _Worker) -> list[Span]:
        started, entered = self._started.get(place), self._entered.get(place)
        if started is None or entered is None:
            return []
        origin = entered.origin
        seconds = (entered.mono_ns - started.mono_ns) / 1e9
        attributes = self._attributes(origin) | {"resilience.sign": "entry"}
        name = ("import", origin.initial_rank)
        return [self._span("import", origin, name, entered.wall_ns, seconds, attributes)]

    # -- interruptions --------------------------------------------------------------------------

    def _interrupted(self, record: Record, seen: InterruptionRecord) -> Span:
        origin = record.origin
        at = record.wall_ns if seen.detected_wall_ns is None else min(seen.detected_wall_ns, record.wall_ns)
        attributes = self._attributes(origin) | {"resilience.rank.initial": seen.rank} | interruption_attributes(seen)
        noted = () if seen.exception is None else (SpanEvent("exception", at, exception_event(seen.exception)),)
        name = ("interruption", origin.role, seen.rank)
        return self._span("interruption", origin, name, at, 0.0, attributes, noted, is_error=True)

    # -- shared ---------------------------------------------------------------------------------

    def _span(
        self,
        name: str,
        origin: Origin,
        place: tuple[object, ...],
        end_ns: int,
        seconds: float,
        attributes: dict[str, Value],
        noted: tuple[SpanEvent, ...] = (),
        is_error: bool = False,
    ) -> Span:
        """A span within the node's cycle; `place` is what makes its id, together with how manieth it is."""
        key = (origin.node, origin.attempt, origin.cycle, *place)
        number = self._counts[key]
        self._counts[key] += 1
        return Span(
            name=name,
            trace_id=trace_id(origin, self._parent),
            span_id=identity.span_id(origin.job_id, origin.attempt, origin.cycle, "cycle", origin.node, *place, number),
            parent_id=cycle_span_id(origin),
            start_ns=end_ns - round(max(0.0, seconds) * 1e9),
            end_ns=end_ns,
            attributes=attributes,
            events=noted,
            is_error=is_error,
        )

    def _attributes(self, origin: Origin) -> dict[str, Value]:
        return origin_attributes(origin, "launcher")

    def _job_trace(self, origin: Origin) -> int:
        return self._parent[0] if self._parent else identity.trace_id(origin.job_id, origin.attempt, -1)


def _job_span(origin: Origin) -> int:
    return identity.span_id(origin.job_id, origin.attempt, -1, "job", origin.node)
