"""How do other tools see a run?  Its spans as a file: for Perfetto, or as OTLP in JSON.

Spans are `telemetry.spans.SpanView`'s over the record files: the ids that the live export has. Records are
read file by file, and a file's spans are written before the next one is read. For Perfetto a process is a node
and a thread a rank; a span that does not lie within the one before it (a restart reaches into the next
iteration) is in a further thread of that rank, for slices of one thread have to be nested. There clocks are
corrected; OTLP has the times of the export."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from resilience.analysis.clocks import Clock
from resilience.analysis.load import RECORDS
from resilience.analysis.merge import clocks_of, files_of, records_in
from resilience.attribution.incident import Incident
from resilience.core import encoding, identity
from resilience.core.events import PHASES
from resilience.errors import DecodeError
from resilience.history.history import History
from resilience.telemetry.recording import JOB_FILE
from resilience.telemetry.span import SCOPE, Link, Span, SpanEvent, Trace, Value, parse_traceparent
from resilience.telemetry.spans import SpanView


class _Given(msgspec.Struct):
    """What is read of job.json."""

    traceparent: str = ""


LANES = 16  # threads of a rank or agent
INSTANT_NS = 1000  # how long an interruption is shown
SLACK_NS = 10**6  # lengths are measured, ends are stamped a moment later
_OF_RESTART = frozenset(("restart", *PHASES))
_ANCHOR = ".start"
Place = tuple[int, int]
"""Process and thread."""


def parent_of(folder: Path) -> Trace | None:
    """Return the span that all of a job's are part of: what TRACEPARENT was, by job.json; None if it was not set."""
    try:
        return parse_traceparent(encoding.from_json((folder / JOB_FILE).read_bytes(), _Given).traceparent)
    except (OSError, DecodeError):
        return None


def trace_of(folder: Path, history: History, incident: Incident) -> str:
    """Return the id of the trace in which an incident lies, as viewers show it; "" if the job's name is not known."""
    parent = parent_of(folder)
    if parent is not None:
        return f"{parent[0]:032x}"
    job_id = history.job_id
    return f"{identity.trace_id(job_id, incident.attempt, incident.cycle):032x}" if job_id else ""


def spans_of(folder: Path, parent: Trace | None = None) -> Iterator[tuple[Path, list[Span]]]:
    """Yield the spans of each record file of a run, agents' first. parent: what everything is part of."""
    paths = files_of(folder, RECORDS)
    agents = [path for path in paths if path.stem.endswith("-agent")]
    view = SpanView(parent, is_launched=bool(agents))
    for path in [*agents, *(path for path in paths if path not in agents)]:
        yield path, [span for record in records_in(path) for span in view.take(record)]


# -- OTLP --------------------------------------------------------------------------------------


def otlp(folder: Path, parent: Trace | None = None) -> Iterator[dict[str, Any]]:
    """Yield OTLP/JSON messages (`ExportTraceServiceRequest`), one a record file that has spans.

    Source: opentelemetry-proto, docs/specification.md, "JSON Protobuf Encoding": ids in hexadecimal, 64-bit
    numbers as strings."""
    for _, spans in spans_of(folder, parent):
        if spans:
            first = spans[0].attributes
            about = {"service.name": SCOPE, "host.name": first.get("host.name", ""), "job": first["resilience.job.id"]}
            about["resilience.job.id"] = about.pop("job")
            yield {
                "resourceSpans": [
                    {
                        "resource": {"attributes": _attributes(about)},
                        "scopeSpans": [{"scope": {"name": SCOPE}, "spans": [_otlp(span) for span in spans]}],
                    }
                ]
            }


def _otlp(span: Span) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "traceId": f"{span.trace_id:032x}",
        "spanId": f"{span.span_id:016x}",
        "name": span.name,
        "kind": 1,  # SPAN_KIND_INTERNAL
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
        "status": {"code": 2} if span.is_error else {},
    }
    if span.parent_id is not None:
        plain["parentSpanId"] = f"{span.parent_id:016x}"
    if span.events:
        plain["events"] = [_event(event) for event in span.events]
    if span.links:
        plain["links"] = [_link(link) for link in span.links]
    return plain


def _event(event: SpanEvent) -> dict[str, Any]:
    return {"timeUnixNano": str(event.at_ns), "name": event.name, "attributes": _attributes(event.attributes)}


def _link(link: Link) -> dict[str, Any]:
    kind = _attributes({"resilience.link.kind": link.kind})
    return {"traceId": f"{link.trace_id:032x}", "spanId": f"{link.span_id:016x}", "attributes": kind}


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in values.items()]


def _value(value: Value) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case _:
            return {"stringValue": value}


# -- Perfetto ----------------------------------------------------------------------------------


def perfetto(folder: Path, parent: Trace | None = None) -> Iterator[dict[str, Any]]:
    """Yield trace events of a Chrome trace, times in microseconds from the first record of the run.

    Source: "Trace Event Format" (Chromium) and Perfetto's "External trace formats": complete events (X),
    instants (i), flows (s, f), metadata (M)."""
    clocks = clocks_of(folder)
    zero = min((span.start_ns for _, spans in spans_of(folder, parent) for span in spans), default=0)
    causes = _causes(folder, parent, clocks)
    nodes: dict[str, int] = {}
    flows = 0
    for path, spans in spans_of(folder, parent):
        if not spans:
            continue
        node = str(spans[0].attributes.get("host.name", "?"))
        if node not in nodes:
            nodes[node] = len(nodes) + 1
            yield _named(nodes[node], 0, "process_name", f"node {node}")
        rank = path.stem.rpartition("-")[2]
        base = (int(rank) + 1 if rank.isdecimal() else 0) * LANES
        offset = _offset(clocks, node) + zero
        used: set[int] = set()
        for lane, span in _lanes(_closed(spans)):
            thread = base + lane
            if lane not in used:
                used.add(lane)
                who = f"rank {rank}" if rank.isdecimal() else "agent"
                restarts = lane == 1 and rank.isdecimal()
                beside = "" if not lane else " restarts" if restarts else f" ({lane + 1})"
                yield _named(nodes[node], thread, "thread_name", who + beside)
                yield _sorted(nodes[node], thread)
            yield _slice(span, (nodes[node], thread), offset)
            yield from (_instant(event, (nodes[node], thread), offset) for event in span.events)
            for link in span.links:
                cause = causes.get(link.span_id)
                if link.kind == "caused_by" and cause is not None:
                    flows += 1
                    pid, at = nodes.setdefault(cause[0], len(nodes) + 1), (cause[2] - zero) / 1e3
                    flow = {"cat": "caused_by", "name": "caused_by", "id": flows}
                    yield {"ph": "s", **flow, "pid": pid, "tid": cause[1], "ts": at}
                    here = {"pid": nodes[node], "tid": thread, "ts": (span.start_ns - offset) / 1e3}
                    yield {"ph": "f", "bp": "e", **flow, **here}


def _causes(folder: Path, parent: Trace | None, clocks: Sequence[Clock]) -> dict[int, tuple[str, int, int]]:
    """Where interruptions stand, by span id: node, thread, time. Others point at them."""
    found: dict[int, tuple[str, int, int]] = {}
    for path, spans in spans_of(folder, parent):
        rank = path.stem.rpartition("-")[2]
        base = (int(rank) + 1 if rank.isdecimal() else 0) * LANES
        for lane, span in _lanes(_closed(spans)):
            if span.name == "interruption":
                node = str(span.attributes.get("host.name", "?"))
                found[span.span_id] = (node, base + lane, span.start_ns - _offset(clocks, node))
    return found


def _closed(spans: list[Span]) -> list[Span]:
    """Without anchors of spans that ended; an anchor of one that did not lasts to the end of its file."""
    ended = {span.span_id for span in spans if not span.name.endswith(_ANCHOR)}
    last = max((span.end_ns for span in spans), default=0)
    found: list[Span] = []
    for span in spans:
        if span.name == "interruption":  # an arrow needs a slice that it can begin in
            found.append(msgspec.structs.replace(span, end_ns=span.start_ns + INSTANT_NS))
        elif not span.name.endswith(_ANCHOR):
            found.append(span)
        elif span.parent_id not in ended and not _is_told(span, spans):
            name = f"{span.name.removesuffix(_ANCHOR)} (no end on record)"
            found.append(msgspec.structs.replace(span, name=name, end_ns=last))
    return found


def _is_told(anchor: Span, spans: list[Span]) -> bool:
    """Whether a span of the anchor's name covers its time: the launcher's anchors do not name their span."""
    name = anchor.name.removesuffix(_ANCHOR)
    at = anchor.start_ns  # a record of its own, a little later
    return any(s.name == name and s.start_ns - SLACK_NS <= at <= s.end_ns + SLACK_NS for s in spans)


def _lanes(spans: list[Span]) -> Iterator[tuple[int, Span]]:
    """Give each span a lane in which it lies within what is open there, or after it.

    Restarts have a lane of their own. Ends that were told a moment apart are cut to nest: `SLACK_NS`."""
    lanes: list[list[int]] = []  # ends of what is open, outermost first
    known = {span.span_id: span for span in spans}
    within = [_within(span, known.get(span.parent_id or 0)) for span in spans]
    parents = {span.parent_id for span in spans}
    for span in sorted(within, key=lambda span: (span.start_ns, -span.end_ns, span.span_id not in parents)):
        for number in range(int(span.name in _OF_RESTART), LANES):
            lanes += [[] for _ in range(number + 1 - len(lanes))]
            opened = lanes[number]
            start = span.start_ns
            while opened and opened[-1] <= span.start_ns + SLACK_NS and opened[-1] < span.end_ns - SLACK_NS:
                start = max(start, opened.pop())
            while opened and opened[-1] <= span.start_ns:
                opened.pop()
            if not opened or span.end_ns <= opened[-1] + SLACK_NS or number == LANES - 1:
                end = span.end_ns if not opened else min(span.end_ns, max(opened[-1], start))
                opened.append(max(start, end))
                yield number, msgspec.structs.replace(span, start_ns=start, end_ns=max(start, end))
                break


def _within(span: Span, parent: Span | None) -> Span:
    """A span that begins or ends a moment outside of its parent, cut."""
    if parent is None:
        return span
    start, end = span.start_ns, span.end_ns
    start = parent.start_ns if 0 < parent.start_ns - start <= SLACK_NS else start
    end = parent.end_ns if 0 < end - parent.end_ns <= SLACK_NS else end
    return msgspec.structs.replace(span, start_ns=start, end_ns=max(start, end))


def _offset(clocks: Sequence[Clock], node: str) -> int:
    return next((clock.offset_ns for clock in clocks if clock.node == node), 0)


def _slice(span: Span, place: Place, offset: int) -> dict[str, Any]:
    arguments = {**span.attributes, "trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"}
    times = {"ts": (span.start_ns - offset) / 1e3, "dur": (span.end_ns - span.start_ns) / 1e3}
    category = "error" if span.is_error else str(span.attributes.get("resilience.layer", SCOPE))
    return {"ph": "X", "name": span.name, "cat": category, "pid": place[0], "tid": place[1], **times, "args": arguments}


def _instant(event: SpanEvent, place: Place, offset: int) -> dict[str, Any]:
    at = {"pid": place[0], "tid": place[1], "ts": (event.at_ns - offset) / 1e3}
    return {"ph": "i", "s": "t", "name": event.name, "cat": "event", **at, "args": event.attributes}


def _named(pid: int, tid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _sorted(pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
