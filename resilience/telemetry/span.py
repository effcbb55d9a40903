"""What is a span?  Plain values; `telemetry.otlp` converts them into OpenTelemetry's."""

from __future__ import annotations

import math
import re
from typing import Literal

import msgspec

from resilience.facts import events, identity
from resilience.facts.identity import Origin, node_key, run_key
from resilience.facts.interruptions import ExceptionInfo, InterruptionRecord

SCOPE = "resilience"
ALL_UP_TO = 256  # largest world in which every rank is shown
SAMPLED = 64  # ranks shown in a larger world, besides those interrupted by their own fault
_CONVENTIONS = {
    "code": "process.exit.code",
    "worker_pid": "process.pid",
    "rank_pid": "process.pid",
    "file": "code.file.path",
    "line": "code.line.number",
    "function": "code.function.name",
}
"""Event fields with a name in OpenTelemetry's semantic conventions."""

_TRACEPARENT = re.compile(
    "(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-[0-9a-f]{2}(-.*)?", re.IGNORECASE
)

Value = str | int | float | bool
Trace = tuple[int, int]
"""Trace id and span id."""


LinkKind = Literal["caused_by", "previous_iteration", "previous_cycle", "job"]


class Link(msgspec.Struct, frozen=True):
    """Points from a span to another one."""

    trace_id: int
    span_id: int
    kind: LinkKind


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
    """Return trace and parent span id of a W3C `traceparent`, None if it is invalid.

    Source: W3C Trace Context, section 3.2."""
    match = _TRACEPARENT.fullmatch(text.strip())
    if match is None or match["version"] == "ff":
        return None
    trace, span = int(match["trace"], 16), int(match["span"], 16)
    return (trace, span) if trace and span else None


def to_traceparent(ids: Trace) -> str:
    """Return a span as a W3C `traceparent`, sampled."""
    return f"00-{ids[0]:032x}-{ids[1]:016x}-01"


def trace_id(origin: Origin, parent: Trace | None = None) -> int:
    """Return the trace id of a record: the given parent's, else that of its cycle."""
    return parent[0] if parent else identity.trace_id(origin.job_id, origin.attempt, origin.cycle)


def cycle_span_id(origin: Origin) -> int:
    """Return the span id of a node's part of a cycle, for its children."""
    return identity.span_id(origin.job_id, origin.attempt, origin.cycle, *node_key(origin.node))


def run_span_id(origin: Origin, iteration: int, initial_rank: int) -> int:
    """Return the id of the span in which the wrapped function runs."""
    return identity.span_id(origin.job_id, origin.attempt, origin.cycle, *run_key(origin.call, iteration, initial_rank))


def is_sampled(origin: Origin) -> bool:
    """Return True if a rank's spans are sent even without its own fault: all in a small world, else a sample."""
    size, rank = origin.world_size or 0, origin.initial_rank
    if size <= ALL_UP_TO or rank is None:
        return True
    return identity.span_id(origin.job_id, 0, 0, "sampled", rank) % math.ceil(size / SAMPLED) == 0


def event_of(event: events.Event, at_ns: int) -> SpanEvent:
    """Return an event in the form attached to a span."""
    fields = msgspec.to_builtins(event)
    name = fields.pop("event")
    values = {
        _CONVENTIONS.get(key, f"resilience.{key}"): value if isinstance(value, (str, int, float, bool)) else str(value)
        for key, value in fields.items()
        if value is not None
    }
    return SpanEvent(name, at_ns, values)


def interruption_attributes(record: InterruptionRecord) -> dict[str, Value]:
    """Return the attributes of an interruption's span."""
    attributes: dict[str, Value] = {"resilience.interruption.kind": record.interruption.value}
    if record.detector is not None:
        attributes["resilience.detector"] = record.detector.name
        if record.detector.limit_s is not None:
            attributes["resilience.timeout_s"] = record.detector.limit_s
    if record.open_sections:
        attributes["resilience.section"] = record.open_sections[-1].name
    if record.step is not None:
        attributes["resilience.step"] = record.step
    if record.exception is not None:
        attributes["error.type"] = record.exception.type
    elif record.exit is not None:
        attributes["error.type"] = record.exit.signal or f"exit code {record.exit.code}"
    return attributes


def place_of_rank(record: InterruptionRecord) -> dict[str, Value | None]:
    """Return where an interrupted rank ran, in place of the origin of a record that another process wrote about it."""
    return {
        "host.name": record.node,
        "resilience.rank.active": record.active_rank,
        "process.pid": record.pid,
    }


def origin_attributes(origin: Origin, layer: str) -> dict[str, Value]:
    """Return an origin as attributes."""
    attributes: dict[str, Value | None] = {
        "resilience.job.id": origin.job_id,
        "resilience.layer": layer,
        "resilience.attempt": origin.attempt,
        "resilience.cycle": origin.cycle,
        "resilience.rank.initial": origin.initial_rank,
        "resilience.rank.active": origin.rank,
        "resilience.world_size": origin.world_size,
        "resilience.role": origin.role,
        "host.name": origin.node,
        "process.pid": origin.pid,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def exception_event(error: ExceptionInfo) -> dict[str, Value]:
    """Source: OpenTelemetry semantic conventions for exceptions on spans."""
    lines = [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in error.stack]
    trace = "\n".join(["Traceback (most recent call last):", *lines, error.in_words])
    return {
        "exception.type": error.type,
        "exception.message": error.message,
        "exception.stacktrace": trace,
        "resilience.fingerprint": error.fingerprint,
    }
