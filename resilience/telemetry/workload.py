"""How do spans of the workload's own tracer become children of ours?

While a wrapped function runs, the span of its run is the current span of OpenTelemetry's context, as a remote parent:
spans that the function's own tracer starts become its children. The ids are hashes, so nothing needs to be exchanged.
Only a program that has imported OpenTelemetry before the function is entered pays for this. A program that imports it
later, or starts spans in its own threads, passes `traceparent()` as their parent. Never raises."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from resilience.facts.identity import Origin
from resilience.system.environment import Exporting
from resilience.telemetry import span

_here = ""


def traceparent() -> str:
    """Return the W3C `traceparent` of the span that this process's work is part of; "" if there is none.

    Within a wrapped function, this is its run in the current iteration; elsewhere it is TRACEPARENT, which under the
    launcher is the node's cycle."""
    return _here or Exporting.from_environment().traceparent


@contextmanager
def running(origin: Origin) -> Iterator[None]:
    """Make the run of this rank's iteration the current span of the body."""
    global _here
    parent = span.parse_traceparent(Exporting.from_environment().traceparent)
    rank = -1 if origin.initial_rank is None else origin.initial_rank
    ids = span.trace_id(origin, parent), span.run_span_id(origin, origin.iteration or 0, rank)
    previous, _here = _here, span.to_traceparent(ids)
    token = _attached(ids)
    try:
        yield
    finally:
        _here = previous
        _detach(token)


def _attached(ids: span.Trace) -> Any:
    """Make it OpenTelemetry's current span; return the token that undoes this, None if OpenTelemetry is not in use."""
    trace, context = sys.modules.get("opentelemetry.trace"), sys.modules.get("opentelemetry.context")
    if trace is None or context is None:
        return None
    try:
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        remote = trace.SpanContext(ids[0], ids[1], is_remote=True, trace_flags=flags)
        return context.attach(trace.set_span_in_context(trace.NonRecordingSpan(remote)))
    except Exception:  # a foreign library, perhaps half imported: its spans stay without our parent
        return None


def _detach(token: Any) -> None:
    try:
        if token is not None:
            sys.modules["opentelemetry.context"].detach(token)
    except Exception:  # as above; an interrupted function may have left its own span's context behind
        pass
