"""How do other tools see a run?  Its spans as a file: for Perfetto, or as OTLP in JSON.

`telemetry.spans.SpanView` builds the spans from the record files, with the ids of the live export. Records are read
file by file, and the spans of a rank, or of a launcher node, are written before the next one is read. A span without a
recorded end lasts to the last record of its rank or agent. For Perfetto, a process is a node and a thread is a rank.
The slices of one thread must nest, so a span that overlaps the previous one (a restart extends into the next iteration)
goes to another thread of that rank. Perfetto output has corrected clocks; OTLP has the times of the export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec

from resilience.attribution.incident import Incident
from resilience.errors import DecodeError
from resilience.facts import encoding, identity
from resilience.facts.events import PHASES
from resilience.facts.identity import Job, owner_of
from resilience.history.clocks import offsets_of
from resilience.history.history import History
from resilience.run_folder.load import RECORDS
from resilience.run_folder.merge import clocks_of, files_of, records_in
from resilience.system.render import say_json
from resilience.telemetry.recording import read_job
from resilience.telemetry.span import SCOPE, Link, Span, SpanEvent, Trace, Value, parse_traceparent
from resilience.telemetry.spans import SpanView

LANES = 16  # threads of a rank or agent
INSTANT_NS = 1000  # displayed length of an interruption
SLACK_NS = 10**6  # tolerance: durations are measured, but ends are stamped a moment later
_OF_RESTART = frozenset(("restart", *PHASES))
_ANCHOR = ".start"
Place = tuple[int, int]
"""Process and thread."""


def parent_of(folder: Path) -> Trace | None:
    """Return the parent span of all spans of a job: TRACEPARENT from job.json; None if it was not set."""
    return parse_traceparent(_job_info(folder).traceparent)


def _job_info(folder: Path) -> Job:
    try:
        return read_job(folder)
    except (OSError, DecodeError):
        return Job("")


def trace_of(folder: Path, history: History, incident: Incident) -> str:
    """Return the id of an incident's trace, as viewers show it; "" if the job's name is unknown."""
    parent = parent_of(folder)
    if parent is not None:
        return f"{parent[0]:032x}"
    job_id = history.job_id
    return f"{identity.trace_id(job_id, incident.attempt, incident.cycle):032x}" if job_id else ""


class Batch(NamedTuple):
    """Spans of one rank, or of an agent. rank: initial rank."""

    node: str
    rank: int | None
    spans: list[Span]


def spans_of(folder: Path, parent: Trace | None = None) -> Iterator[Batch]:
    """Yield the spans of a run by rank and agent. parent: the parent of all spans."""
    nodes: dict[str, list[Path]] = {}
    for path in files_of(folder, RECORDS):
        nodes.setdefault(owner_of(path.stem).node, []).append(path)
    is_launched = any(owner_of(path.stem).is_agent for paths in nodes.values() for path in paths)
    view = SpanView(parent, is_launched)
    for node, paths in nodes.items():
        by_rank: dict[int | None, list[Span]] = {}
        for path in sorted(paths, key=_ranks_first):
            for record in records_in(path):
                _add_to_ranks(view.take(record), by_rank, owner_of(path.stem).rank)
            if not is_launched:
                _add_to_ranks(view.left_open(), by_rank, owner_of(path.stem).rank)
                yield from (Batch(node, rank, spans) for rank, spans in by_rank.items())
                by_rank = {}
        _add_to_ranks(view.left_open(), by_rank, None)
        yield from (Batch(node, rank, spans) for rank, spans in sorted(by_rank.items(), key=lambda item: item[0] or -1))


def _ranks_first(path: Path) -> tuple[bool, str]:
    return owner_of(path.stem).is_agent, path.stem


def _add_to_ranks(spans: list[Span], by_rank: dict[int | None, list[Span]], rank: int | None) -> None:
    """Add spans to the rank of their file. An agent's file may complete spans that a rank began."""
    for span in spans:
        is_agents = span.attributes.get("resilience.role") == "agent"
        of_rank = span.attributes.get("resilience.rank.initial") if rank is None else rank
        by_rank.setdefault(of_rank if isinstance(of_rank, int) and not is_agents else None, []).append(span)


# -- OTLP --------------------------------------------------------------------------------------


def otlp(folder: Path, parent: Trace | None = None) -> Iterator[dict[str, Any]]:
    """Yield OTLP/JSON messages (`ExportTraceServiceRequest`), one for each rank and agent that has spans.

    Source: opentelemetry-proto, docs/specification.md, "JSON Protobuf Encoding": ids in hexadecimal, 64-bit
    numbers as strings."""
    version = _job_info(folder).resilience_version
    for batch in spans_of(folder, parent):
        job_id = batch.spans[0].attributes["resilience.job.id"]
        about = {"service.name": SCOPE, "host.name": batch.node, "resilience.job.id": job_id}
        about |= {"service.version": version} if version else {}
        yield {
            "resourceSpans": [
                {
                    "resource": {"attributes": _attributes(about)},
                    "scopeSpans": [{"scope": {"name": SCOPE}, "spans": [_otlp(span) for span in batch.spans]}],
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
        case str():
            return {"stringValue": value}


# -- Perfetto ----------------------------------------------------------------------------------


def perfetto(folder: Path, parent: Trace | None = None) -> Iterator[dict[str, Any]]:
    """Yield trace events of a Chrome trace, times in microseconds from the first record of the run.

    Source: "Trace Event Format" (Chromium) and Perfetto's "External trace formats": complete events (X),
    instants (i), flows (s, f), metadata (M)."""
    offsets = offsets_of(clocks_of(folder))
    zero = min((_first_start(batch, offsets) for batch in spans_of(folder, parent)), default=0)
    causes = _causes(folder, parent, offsets)
    nodes: dict[str, int] = {}
    named: set[str] = set()  # an arrow may number a node before its own spans come
    flows = 0
    for batch in spans_of(folder, parent):
        node = batch.node
        nodes.setdefault(node, len(nodes) + 1)
        if node not in named:
            named.add(node)
            yield _named(nodes[node], 0, "process_name", f"node {node}")
        offset = offsets.get(node, 0) + zero
        used: set[int] = set()
        for lane, span in _lanes(_shown(batch.spans)):
            thread = _first_lane(batch) + lane
            if lane not in used:
                used.add(lane)
                name = "agent" if batch.rank is None else f"rank {batch.rank}"
                beside = "" if not lane else " restarts" if lane == 1 else f" ({lane + 1})"
                yield _named(nodes[node], thread, "thread_name", name + beside)
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
                    target = {"pid": nodes[node], "tid": thread, "ts": (span.start_ns - offset) / 1e3}
                    yield {"ph": "f", "bp": "e", **flow, **target}


def write_events(events: Iterator[dict[str, Any]], out: TextIO) -> None:
    """Write one object with one event per line, so that neither writer nor reader has to hold all events."""
    out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    for number, event in enumerate(events):
        out.write(",\n" if number else "")
        say_json(encoding.to_json(event), out)
    out.write("\n]}\n")


def _first_start(batch: Batch, offsets: Mapping[str, int]) -> int:
    return min(span.start_ns for span in batch.spans) - offsets.get(batch.node, 0)


def _causes(folder: Path, parent: Trace | None, offsets: Mapping[str, int]) -> dict[int, tuple[str, int, int]]:
    """Return node, thread and time of each interruption, by span id, for arrows to them."""
    causes: dict[int, tuple[str, int, int]] = {}
    for batch in spans_of(folder, parent):
        for lane, span in _lanes(_shown(batch.spans)):
            if span.name == "interruption":
                at = span.start_ns - offsets.get(batch.node, 0)
                causes[span.span_id] = (batch.node, _first_lane(batch) + lane, at)
    return causes


def _first_lane(batch: Batch) -> int:
    return 0 if batch.rank is None else (batch.rank + 1) * LANES


def _shown(spans: list[Span]) -> list[Span]:
    """Return the spans to draw: without anchors, and with interruptions long enough for the start of an arrow."""
    drawn: list[Span] = []
    for span in spans:
        if span.name == "interruption":
            drawn.append(msgspec.structs.replace(span, end_ns=span.start_ns + INSTANT_NS))
        elif span.attributes.get("resilience.outcome") == "open":
            drawn.append(msgspec.structs.replace(span, name=f"{span.name} (end not recorded)"))
        elif not span.name.endswith(_ANCHOR):
            drawn.append(span)
    return drawn


def _lanes(spans: list[Span]) -> Iterator[tuple[int, Span]]:
    """Give each span a lane in which it lies inside or after the open spans.

    Restarts have a separate lane. Ends that differ by up to `SLACK_NS` are cut so that spans nest."""
    lanes: list[list[int]] = []  # ends of the open spans, outermost first
    by_id = {span.span_id: span for span in spans}
    within = [_within(span, by_id.get(span.parent_id or 0)) for span in spans]
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
    """Return a span, cut to its parent if it begins or ends up to `SLACK_NS` outside."""
    if parent is None:
        return span
    start, end = span.start_ns, span.end_ns
    start = parent.start_ns if 0 < parent.start_ns - start <= SLACK_NS else start
    end = parent.end_ns if 0 < end - parent.end_ns <= SLACK_NS else end
    return msgspec.structs.replace(span, start_ns=start, end_ns=max(start, end))


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
