"""A training script with an OpenTelemetry tracer of its own; for tests that follow one trace over all processes.

Rank 1 is killed in the launcher's first cycle; in the second one rank 0 fails once."""

import os
import signal

import torch
import torch.distributed as dist
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

import resilience
from resilience.inprocess import CallWrapper, Wrapper

trace.set_tracer_provider(TracerProvider())
trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
tracer = trace.get_tracer("user")


@Wrapper()
def train(call: CallWrapper) -> None:
    rank, cycle = int(os.environ["RANK"]), int(os.environ["RESILIENCE_CYCLE"])
    log = resilience.get_logger()
    dist.init_process_group("gloo")
    for step in range(4):
        resilience.step(step)
        with tracer.start_as_current_span("step") as span:
            span.set_attributes({"step": step, "cycle": cycle, "iteration": call.iteration, "rank": rank})
            log.info("in a step")
            dist.all_reduce(torch.ones(1))
            if (cycle, rank, step) == (0, 1, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            if (cycle, rank, step, call.iteration) == (1, 0, 2, 0):
                raise ValueError("planned")
    dist.destroy_process_group()


train()
