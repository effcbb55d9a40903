"""Metrics leave over OTLP with the values of the endpoint, and histograms that resolve."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience.facts import events
from resilience.system.environment import Exporting
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.otlp_metrics import MOST_BUCKETS, exponential
from resilience.telemetry.timings import Histogram

pytest.importorskip("opentelemetry.sdk", reason="the extra `otlp` is not installed")

from resilience.telemetry.otlp_metrics import MetricSender, _Converter, unit_of
from tests.support.busy_node import busy_node
from tests.support.record_streams import Fault, job


@given(durations=st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_each_value_lies_within_its_exponential_bucket(durations: list[float]) -> None:
    fine = Histogram()
    for duration in durations:
        fine.add(duration)
    scale, offset, counts, zeros = exponential(fine)
    assert zeros + sum(counts) == len(durations)
    assert len(counts) <= MOST_BUCKETS
    base = 2.0 ** (2.0**-scale)
    seen = 0
    for number, count in enumerate(counts):
        for duration in sorted(durations)[seen : seen + count]:
            assert base ** (offset + number) / 1.011 <= duration <= base ** (offset + number + 1) * 1.011
        seen += count


def test_durations_of_one_decade_are_resolved_to_two_percent() -> None:
    fine = Histogram()
    for number in range(100):
        fine.add(0.010 * 10 ** (number / 100))
    scale, *_ = exponential(fine)
    assert 2.0 ** (2.0**-scale) < 1.025


def test_nothing_and_zeros_have_no_buckets() -> None:
    assert exponential(Histogram())[2:] == ([], 0)
    fine = Histogram()
    fine.add(0.0)
    assert exponential(fine)[2:] == ([], 1)


def test_job_and_attempt_are_those_of_the_spans_and_not_the_name_of_the_folder() -> None:
    view = MetricView()
    for record in job(world=1).records:
        origin = msgspec.structs.replace(record.origin, job_id="team/job7", attempt=1)
        view.take(msgspec.structs.replace(record, origin=origin))
    (resource,) = _Converter("node0")([], *view.job).resource_metrics
    about = resource.resource.attributes
    assert (about["resilience.job.id"], about["resilience.attempt"]) == ("team/job7", 1)


def test_exported_values_are_those_of_the_endpoint() -> None:
    view = busy_node()
    found = view.samples()
    (resource,) = _Converter("node0")(view.exported(), *view.job).resource_metrics
    about = resource.resource.attributes
    assert (about["resilience.job.id"], about["resilience.attempt"]) == ("job", 0)
    (scope,) = resource.scope_metrics
    compared = 0
    for metric in scope.metrics:
        for point in metric.data.data_points:
            labels = tuple(point.attributes.values())
            if hasattr(point, "scale"):
                buckets = [
                    n for (name, key), n in found.items() if name == f"{metric.name}_bucket" and key[:-1] == labels
                ]
                assert point.count == sum(buckets) == point.zero_count + sum(point.positive.bucket_counts)
                assert point.sum == pytest.approx(found[f"{metric.name}_sum", labels])
            else:
                value = found.get((metric.name, labels), found.get((f"{metric.name}_total", labels), math.nan))
                assert point.value == pytest.approx(value)
            compared += 1
    assert compared > 200


def test_values_to_export_stay_as_they_are_while_further_records_are_taken() -> None:
    """They are converted and sent in another thread than the records are taken in."""
    view, told = MetricView(), job([Fault("exception", 1, 0)])
    for record in told.records:
        view.take(record)
    rows = view.exported()
    before = histograms_of(view, rows)
    for record in told.records:
        for event in (events.StageEnded("restart", "completed", 500.0), events.ElasticMeasured("x.duration.ms", 9.0)):
            view.take(msgspec.structs.replace(record, event=event))
    assert before and histograms_of(view, rows) == before != histograms_of(view, view.exported())


def histograms_of(view: MetricView, rows: list[Any]) -> list[tuple[str, int, float, int]]:
    """Return name, count and sum of each histogram, and the sum of its buckets."""
    (resource,) = _Converter("node0")(rows, *view.job).resource_metrics
    points = [
        (metric.name, point)
        for metric in resource.scope_metrics[0].metrics
        for point in metric.data.data_points
        if hasattr(point, "scale")
    ]
    return [(name, p.count, p.sum, p.zero_count + sum(p.positive.bucket_counts)) for name, p in points]


def test_values_that_cannot_be_converted_are_no_fault_of_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://127.0.0.1:9/v1/metrics")
    view, emitted = MetricView(), list[events.Event]()
    monkeypatch.setattr(view, "exported", lambda: 1 // 0)
    sender = MetricSender(Exporting.from_environment(), "node0", view, emitted.append)
    sender.close(60.0)
    reason = "metrics cannot be converted: ZeroDivisionError: integer division or modulo by zero"
    assert emitted == [events.ExportFailed("otlp", reason, signal="metric")]


def test_histogram_leaves_out_its_minimum_which_is_not_known() -> None:
    encoder = pytest.importorskip("opentelemetry.exporter.otlp.proto.common.metrics_encoder")
    (resource,) = encoder.encode_metrics(_Converter("node0")(busy_node().exported(), "job", 0)).resource_metrics
    points = [
        point for metric in resource.scope_metrics[0].metrics for point in metric.exponential_histogram.data_points
    ]
    assert points and not any(point.HasField("min") for point in points)
    assert all(point.HasField("max") for point in points)


@pytest.mark.parametrize(
    ("environment", "protocol"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_METRICS_EXPORTER": "otlp"}, "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318/v1/metrics"}, "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c", "OTEL_METRICS_EXPORTER": "none"}, None),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_metrics_leave_only_where_somebody_asks_for_it(environment: dict[str, str], protocol: str | None) -> None:
    assert Exporting.from_environment(environment).metrics_protocol == protocol


def test_names_that_are_not_utf8_are_sent_with_escapes() -> None:
    (resource,) = _Converter("node-\udcff")([], "job-\udcff", 0).resource_metrics
    attributes = resource.resource.attributes
    assert (attributes["resilience.job.id"], attributes["host.name"]) == ("job-\\udcff", "node-\\udcff")


def test_only_ratios_have_the_unit_of_ratios() -> None:
    (resource,) = _Converter("node0")(busy_node().exported(), "job", 0).resource_metrics
    (scope,) = resource.scope_metrics
    units = {metric.name: metric.unit for metric in scope.metrics}
    assert (units["resilience_ranks"], units["resilience_lost_seconds"]) == ("", "s")
    assert {name.endswith("_ratio") for name, unit in units.items() if unit == "1"} <= {True}
    assert unit_of("resilience_timeout_headroom_ratio") == "1"
