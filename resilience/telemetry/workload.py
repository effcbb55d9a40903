"""How do spans of the workload's own tracer come to lie within ours?

While a wrapped function runs, the span of its run is the current one of OpenTelemetry's context, as a remote
parent: what the function's own tracer starts is its child. The ids are hashes, so nothing is asked for. Only a
program that has imported OpenTelemetry when the function is entered pays for it; one that imports it later, or
that starts spans in threads of its own, gives them `traceparent()` as their parent. Never raises."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from resilience.adapters.environment import Exporting
from resilience.core.identity import Origin
from resilience.telemetry import span

_here = ""


def traceparent() -> str:
    """Return the W3C `traceparent` of the span that this process's work is part of; "" if there is none.

    Within a wrapped function its run in this iteration; elsewhere TRACEPARENT, which under the launcher is the
    node's cycle."""
    return _here or Exporting.from_environment().traceparent


@contextmanager
def running(origin: Origin) -> Iterator[None]:
    """Let the run of this rank's iteration be the current span of the body."""
    global _here
    parent = span.parse_traceparent(Exporting.from_environment().traceparent)
    rank = -1 if origin.initial_rank is None else origin.initial_rank
    ids = span.trace_id(origin, parent), span.run_span_id(origin, origin.iteration or 0, rank)
    before, _here = _here, span.to_traceparent(ids)
    token = _attached(ids)
    try:
        yield
    finally:
        _here = before
        _detach(token)


def _attached(ids: span.Trace) -> Any:
    """Make it OpenTelemetry's current span; answers what takes it back, None if nobody uses OpenTelemetry."""
    trace, context = sys.modules.get("opentelemetry.trace"), sys.modules.get("opentelemetry.context")
    if trace is None or context is None:
        return None
    try:
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        remote = trace.SpanContext(ids[0], ids[1], is_remote=True, trace_flags=flags)
        return context.attach(trace.set_span_in_context(trace.NonRecordingSpan(remote)))
    except Exception:  # a foreign library, half imported perhaps: its spans stand alone
        return None


def _detach(token: Any) -> None:
    try:
        if token is not None:
            sys.modules["opentelemetry.context"].detach(token)
    except Exception:  # as above; an interrupted function may have left the context of its own span behind
        pass
