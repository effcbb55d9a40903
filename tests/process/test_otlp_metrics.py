"""A collector gets the metrics of a node over OTLP, the last ones before the exporter leaves."""

from __future__ import annotations

import gzip
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otlp` is not installed")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

import resilience
from resilience.facts import events
from resilience.telemetry.exporters import NodeExports
from tests.support.record_streams import Fault, job


class Collector(ThreadingHTTPServer):
    """Keeps the metrics that come, by name; the last ones count. resources: all. status: what it answers."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.metrics: dict[str, Any] = {}
        self.resources: list[dict[str, str]] = []
        self.has_been_asked = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportMetricsServiceRequest.FromString(body)
        assert isinstance(self.server, Collector)
        for resource in request.resource_metrics:
            self.server.resources.append({each.key: each.value.string_value for each in resource.resource.attributes})
            for scope in resource.scope_metrics:
                self.server.metrics.update({metric.name: metric for metric in scope.metrics})
        self.send_response(self.server.status)
        self.end_headers()
        self.server.has_been_asked.set()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def collecting(status: int = 200) -> Iterator[Collector]:
    server = Collector(status)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "RESILIENCE_METRICS_PORT",
        "RESILIENCE_METRICS_TEXTFILE",
        "TRACEPARENT",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    return job([Fault("exception", 1, 0)], started_ns=time.time_ns() - 12 * 10**9).write(tmp_path / "run")


def test_collector_gets_counters_and_exponential_histograms_before_the_exporter_leaves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emitted: list[events.Event] = []
    with collecting() as collector:
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://127.0.0.1:{collector.server_port}/v1/metrics"
        )
        exports = NodeExports.start(folder, "node", emitted.append)
        assert exports is not None
        exports.poll()
        exports.close(120.0)
        found = collector.metrics
    assert emitted == []
    ended = found["resilience_restart_iterations"].sum
    assert ended.is_monotonic
    counted = {point.attributes[1].value.string_value: point.as_double for point in ended.data_points}
    assert counted == {"completed": 1, "interrupted": 1}
    (duration,) = found["resilience_restart_duration_seconds"].exponential_histogram.data_points
    assert duration.count == sum(duration.positive.bucket_counts) == 4  # of four ranks
    assert 0 < duration.start_time_unix_nano < duration.time_unix_nano


def test_all_metrics_name_the_service_its_version_and_its_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://127.0.0.1:{collector.server_port}/v1/metrics"
        )
        exports = NodeExports.start(folder, "node", lambda event: None)
        assert exports is not None
        exports.poll()
        exports.close(120.0)
        resources = collector.resources
    expected = {"service.name": "resilience", "service.version": resilience.__version__, "host.name": "node"}
    assert [{key: resource.get(key) for key in expected} for resource in resources] == [expected] * len(resources)
    assert resources


def test_metrics_are_sent_while_the_files_of_ranks_do_not_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = folder / "timings" / "node-0.signs"
    silent.parent.mkdir(exist_ok=True)
    os.mkfifo(silent)  # its readers wait
    with collecting() as collector:
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/metrics"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", endpoint)
        exports = NodeExports.start(folder, "node", lambda event: None)
        assert exports is not None
        exports.poll()
        exports.close(120.0)
    (is_up,) = collector.metrics["resilience_run_folder_up"].gauge.data_points
    assert is_up.as_double == 0
    os.close(os.open(silent, os.O_RDWR))


def test_collector_that_takes_no_metrics_is_reported_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emitted: list[events.Event] = []
    with collecting(404) as collector:
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://127.0.0.1:{collector.server_port}/v1/metrics"
        )
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
        exports = NodeExports.start(folder, "node", emitted.append)
        assert exports is not None
        exports.poll()
        deadline = time.monotonic() + 60.0
        while not emitted:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        exports.close(60.0)
    (failed,) = emitted
    assert isinstance(failed, events.ExportFailed) and (failed.exporter, failed.signal) == ("otlp", "metric")


def test_report_of_refused_metrics_names_the_endpoint_and_the_cause(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emitted: list[events.Event] = []
    with collecting(404) as collector:
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/metrics"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", endpoint)
        exports = NodeExports.start(folder, "node", emitted.append)
        assert exports is not None
        exports.poll()
        exports.close(120.0)
    (failed,) = emitted
    assert isinstance(failed, events.ExportFailed)
    assert failed.reason.startswith(f"{endpoint} does not take metrics: ") and "404" in failed.reason


def test_request_that_a_collector_refuses_for_now_is_not_repeated_after_close(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    with collecting(503) as collector:
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://127.0.0.1:{collector.server_port}/v1/metrics"
        )
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
        exports = NodeExports.start(folder, "node", lambda event: None)
        assert exports is not None
        exports.poll()
        assert collector.has_been_asked.wait(60.0)
        exports.close(0.1)  # the fixture `exporters_end` awaits the thread
