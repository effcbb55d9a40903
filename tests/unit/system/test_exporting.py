"""What the standard OTEL_* variables say of spans."""

from __future__ import annotations

import pytest

from resilience.system.environment import Exporting


def test_without_an_endpoint_nothing_is_exported() -> None:
    assert Exporting.from_environment({}).protocol is None


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_an_endpoint_switches_spans_on_over_http(name: str) -> None:
    found = Exporting.from_environment({name: "http://collector:4318"})
    assert (found.protocol, found.endpoint) == ("http/protobuf", "http://collector:4318")


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_what_is_switched_off_is_off(name: str, value: str) -> None:
    found = Exporting.from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", name: value})
    assert found.protocol is None


def test_the_protocol_of_traces_wins_over_the_general_one() -> None:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
    }
    assert Exporting.from_environment(env).protocol == "grpc"


def test_numbers_of_the_batch_processor_are_taken_and_nonsense_is_not() -> None:
    env = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_BSP_MAX_QUEUE_SIZE": "16", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "99"}
    found = Exporting.from_environment(env)
    assert (found.delay_s, found.queue, found.batch) == (0.05, 16, 16)
    assert Exporting.from_environment(dict.fromkeys(env, "-1")) == Exporting()
