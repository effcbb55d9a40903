"""How do metrics leave over OTLP?  A thread periodically sends the same view, with exponential histograms.

An exponential histogram has buckets of equal ratio: a quantile is within 2.2 %, or within the ratio that MOST_BUCKETS
allow. Values are cumulative since the node's part of the job began. If a collector does not answer, measurements are
lost, which is reported once; the next transmission contains all values again."""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections.abc import Iterable
from typing import Any

from resilience.errors import error_in_words
from resilience.facts import encoding, events
from resilience.facts.masking import masked_text
from resilience.system.environment import Exporting
from resilience.telemetry.catalogue import Labels, Metric
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.otlp import Emit, end_retries, resource_of, why_not_sent
from resilience.telemetry.span import SCOPE
from resilience.telemetry.timings import Histogram, upper_bound

EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.metric_exporter",
}
FINEST_SCALE = 5  # 2 ** scale buckets per factor of two; ours are 1 % wide
MOST_BUCKETS = 160  # per histogram, as in OpenTelemetry's own
_MIDDLE = 1.005  # of a bucket of 1 %


class MetricSender:
    """Sends a view's metrics from a separate thread until `close`."""

    def __init__(self, exporting: Exporting, node: str, view: MetricView, emit: Emit) -> None:
        self._exporting = exporting
        self._node = node
        self._view = view
        self._emit = emit
        self._exporter: Any = None
        self._done = threading.Event()
        self._is_over = False  # the time for the last values has passed
        self._thread = threading.Thread(target=self._run, name="resilience-otlp-metrics", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Send the last values, within `timeout` seconds. A request that is under way then ends by its own timeout, is
        not repeated, and blocks nothing."""
        self._done.set()
        self._thread.join(timeout)
        self._is_over = True
        if self._thread.is_alive():
            end_retries(self._exporter)

    def _run(self) -> None:
        try:
            name = self._exporting.metrics_protocol or ""
            exporter = self._exporter = importlib.import_module(EXPORTERS[name]).OTLPMetricExporter()
            convert = _Converter(self._node)
        except Exception as error:  # the exporter reads many variables, and a bad one may raise anything
            self._emit(
                events.ExportFailed(
                    "otlp", f"cannot start: metrics: {masked_text(str(error))}"[:500], is_at_start=True, signal="metric"
                )
            )
            return
        has_failed = False
        is_last = False
        while not is_last and not self._is_over:
            is_last = self._done.wait(self._exporting.metrics_every_s)
            failure = self._send(exporter, convert)
            if failure and not has_failed:
                self._emit(events.ExportFailed("otlp", failure, signal="metric"))
            has_failed = bool(failure)

    def _send(self, exporter: Any, convert: _Converter) -> str:
        """Send the present values. Return why they were not sent, "" if they were."""
        try:
            data = convert(self._view.exported(), *self._view.job)
        except Exception as error:  # edge to the views and the SDK: an exception costs measurements only
            return f"metrics cannot be converted: {masked_text(error_in_words(error))}"[:500]
        cause = why_not_sent(exporter, data)
        return cause and f"{masked_text(self._exporting.metrics_endpoint)} does not take metrics: {cause}"


class _Converter:
    """Converts rows of the view into OpenTelemetry's data. Raises: ImportError."""

    def __init__(self, node: str) -> None:
        from opentelemetry.sdk.metrics import export as otel
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from resilience import __version__

        self._otel = otel
        self._new_resource, self._node = Resource, resource_of(node)
        self._scope = InstrumentationScope(SCOPE, __version__)

    def __call__(self, rows: Iterable[tuple[Metric, list[tuple[Labels, Any]]]], job_id: str, attempt: int) -> Any:
        job: dict[str, str | int] = {"resilience.job.id": encoding.text(job_id), "resilience.attempt": attempt}
        resource = self._node.merge(self._new_resource(job))
        now = time.time_ns()
        all_rows = list(rows)
        start_times = [value for metric, values in all_rows if metric.name == BEGAN for _, value in values]
        start = round(start_times[0] * 1e9) if start_times else now
        metrics = [self._metric(metric, values, start, now) for metric, values in all_rows if values]
        scope = self._otel.ScopeMetrics(self._scope, metrics, "")
        return self._otel.MetricsData([self._otel.ResourceMetrics(resource, [scope], "")])

    def _metric(self, metric: Metric, values: list[tuple[Labels, Any]], start: int, now: int) -> Any:
        otel, cumulative = self._otel, self._otel.AggregationTemporality.CUMULATIVE
        labelled = [(dict(zip(metric.labels, labels, strict=True)), value) for labels, value in values]
        data: Any
        if metric.kind == "histogram":
            points = [self._histogram(labels, value.fine, value.sum_ns, start, now) for labels, value in labelled]
            data = otel.ExponentialHistogram(points, cumulative)
        else:
            numbers = [otel.NumberDataPoint(labels, start, now, float(value)) for labels, value in labelled]
            data = otel.Gauge(numbers) if metric.kind == "gauge" else otel.Sum(numbers, cumulative, True)
        return otel.Metric(metric.name.removesuffix("_total"), metric.help, unit_of(metric.name), data)

    def _histogram(self, labels: dict[str, str], fine: Histogram, sum_ns: int, start: int, now: int) -> Any:
        scale, offset, counts, zeros = exponential(fine)
        smallest: Any = None  # is not counted; both fields are optional
        largest: Any = fine.max if fine.count else None
        buckets, none = self._otel.Buckets(offset, counts), self._otel.Buckets(0, [])
        return self._otel.ExponentialHistogramDataPoint(
            labels, start, now, fine.count, sum_ns / 1e9, scale, zeros, buckets, none, 0, smallest, largest
        )


def unit_of(name: str) -> str:
    """Return the unit of a metric. From "1", the translation to Prometheus appends `_ratio` to the name of a gauge."""
    if "_seconds" in name:
        return "s"
    return "1" if name.endswith("_ratio") else ""


BEGAN = "resilience_start_timestamp_seconds"


def exponential(fine: Histogram) -> tuple[int, int, list[int], int]:
    """Return scale, offset, counts and the number of zeros (values up to a microsecond) of an exponential histogram.

    Bucket `offset + i` holds values above 2 ** ((offset + i) / 2 ** scale), up to the next one."""
    zeros = fine.buckets.get(0, 0)
    numbers = {number: count for number, count in fine.buckets.items() if number > 0}
    for scale in range(FINEST_SCALE, -11, -1):
        counts: dict[int, int] = {}
        for number, count in numbers.items():
            index = math.ceil(math.log2(upper_bound(number) / _MIDDLE) * 2.0**scale) - 1
            counts[index] = counts.get(index, 0) + count
        if not counts:
            return scale, 0, [], zeros
        first, last = min(counts), max(counts)
        if last - first < MOST_BUCKETS:
            break
    return scale, first, [counts.get(index, 0) for index in range(first, last + 1)], zeros
