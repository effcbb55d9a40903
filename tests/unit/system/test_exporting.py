"""What the standard OTEL_* variables say of spans."""

from __future__ import annotations

import threading

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


@pytest.mark.parametrize("text", ["5000²", "٣", "1_000", "nan", "inf", " 5", "9" * 5000], ids=lambda text: text[:6])
def test_number_that_python_reads_in_its_own_way_or_refuses_is_not_taken(text: str) -> None:
    names = ("OTEL_BSP_SCHEDULE_DELAY", "OTEL_METRIC_EXPORT_INTERVAL", "OTEL_BSP_MAX_QUEUE_SIZE")
    assert Exporting.from_environment(dict.fromkeys(names, text)) == Exporting()


@pytest.mark.parametrize("text", ["10000000000000000", "9" * 18])
def test_pause_that_is_longer_than_a_thread_can_wait_is_shortened(text: str) -> None:
    names = ("OTEL_BSP_SCHEDULE_DELAY", "OTEL_METRIC_EXPORT_INTERVAL")
    found = Exporting.from_environment(dict.fromkeys(names, text))
    for pause in (found.delay_s, found.metrics_every_s):
        assert threading.Lock().acquire(timeout=pause)  # the kernel's clock takes it
