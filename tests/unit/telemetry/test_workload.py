"""The program's own spans are children of the iteration's run; without OpenTelemetry nothing happens."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import resilience
from resilience.facts.identity import Origin
from resilience.telemetry import span, workload

ORIGIN = Origin("job", "n", "rank", 1, cycle=2, iteration=3, initial_rank=4, rank=1, world_size=8)
RUN = (span.trace_id(ORIGIN), span.run_span_id(ORIGIN, 3, 4))
GIVEN = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACEPARENT", raising=False)


def traced() -> tuple[trace.Tracer, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("user"), exporter


def ids(found: ReadableSpan) -> span.Trace | None:
    return None if found.parent is None else (found.parent.trace_id, found.parent.span_id)


def test_spans_of_the_program_are_children_of_its_run() -> None:
    tracer, exporter = traced()
    with workload.running(ORIGIN), tracer.start_as_current_span("step"), tracer.start_as_current_span("load"):
        pass
    tracer.start_span("after").end()
    load, step, after = exporter.get_finished_spans()
    assert ids(step) == RUN
    assert ids(load) == (RUN[0], step.get_span_context().span_id)
    assert ids(after) is None


def test_function_that_leaves_its_context_behind_does_not_touch_the_next_iteration() -> None:
    tracer, exporter = traced()
    with workload.running(ORIGIN):
        context.attach(trace.set_span_in_context(tracer.start_span("left open by an interruption")))
    with workload.running(ORIGIN), tracer.start_as_current_span("step"):
        pass
    (step,) = exporter.get_finished_spans()
    assert ids(step) == RUN
    assert not trace.get_current_span().get_span_context().is_valid


def test_traceparent_is_the_run_within_and_the_given_one_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resilience.traceparent() == ""
    with workload.running(ORIGIN):
        assert span.parse_traceparent(resilience.traceparent()) == RUN
    monkeypatch.setenv("TRACEPARENT", GIVEN)
    assert resilience.traceparent() == GIVEN
    with workload.running(ORIGIN):
        assert resilience.traceparent() == f"00-{'a' * 32}-{RUN[1]:016x}-01"
    assert resilience.traceparent() == GIVEN


def test_program_without_opentelemetry_does_not_load_it() -> None:
    code = (
        "import sys\n"
        "from resilience.facts.identity import Origin\n"
        "from resilience.telemetry import workload\n"
        "with workload.running(Origin('job', 'n', 'rank', 1, iteration=0, initial_rank=0)): pass\n"
        "print('opentelemetry' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
