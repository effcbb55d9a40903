"""Spans reach a real receiver, metrics are served, and no receiver, disk or file can do the job any harm."""

from __future__ import annotations

import gzip
import json
import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from prometheus_client.parser import text_string_to_metric_families

import resilience
from resilience.facts import events
from resilience.facts.records import to_line
from resilience.run_folder.load import load
from resilience.telemetry import durations, otlp
from resilience.telemetry.exporters import NodeExports
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.span import Span
from resilience.telemetry.spans import SpanView
from tests.process.jobs import STEPS
from tests.support.ranks import Job as RunningJob
from tests.support.ranks import free_port
from tests.support.record_streams import Fault, Job, job

STRAIGHT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Receiver(ThreadingHTTPServer):
    """Takes OTLP over HTTP. mood: what it does with a request."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, mood: str = "ok") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mood = mood
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.has_come = threading.Event()
        self.may_go = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def spans(self) -> dict[int, WireSpan]:
        return {
            int.from_bytes(span.span_id, "big"): span
            for request in self.requests
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        }


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.server.has_come.set()
        if self.server.mood == "stall":
            self.server.may_go.wait(60)
            return
        if self.server.mood == "garbage":
            self.wfile.write(b"\x00\xff garbage" * 10)
            return
        if self.server.mood == "reject":
            self.send_error(400, "no")
            return
        assert self.path == "/v1/traces"
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def receiving(mood: str = "ok") -> Iterator[Receiver]:
    receiver = Receiver(mood)
    thread = threading.Thread(target=receiver.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.may_go.set()
        receiver.shutdown()
        receiver.server_close()
        thread.join()


@pytest.fixture
def told() -> Job:
    """A job that has just been running."""
    faults = [Fault("exception", 1, 0), Fault("kill", 2, 1, 20), Fault("hang", 0, 2, 31)]
    return job(faults, world=3, spares=1, started_ns=time.time_ns())


@pytest.fixture
def emitted() -> list[events.Event]:
    """What the exporters put on record about themselves."""
    return []


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "RESILIENCE_METRICS_PORT", "TRACEPARENT", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")


def spans_of(told: Job) -> dict[int, Span]:
    view = SpanView()
    return {span.span_id: span for record in told.records for span in view.take(record)}


def started(folder: Path, emitted: list[events.Event]) -> NodeExports:
    exports = NodeExports.start(folder, "node", emitted.append)
    assert exports is not None, emitted
    return exports


def kinds(emitted: list[events.Event]) -> list[type]:
    return [type(event) for event in emitted]


def scrape(port: int, accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with STRAIGHT.open(request, timeout=30) as answer:
        return str(answer.read().decode())


def port_of(emitted: list[events.Event]) -> int:
    (begun,) = [e for e in emitted if isinstance(e, events.ExportStarted) and e.exporter == "prometheus"]
    return int(begun.endpoint.split(":")[2].split("/")[0])


# -- spans -------------------------------------------------------------------------------------


def test_spans_reach_a_receiver_as_they_stand_in_the_records(
    told: Job, tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=me")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        exports = started(told.write(tmp_path / "run"), emitted)
        exports.poll()
        exports.close(30.0)
        expected, received = spans_of(told), receiver.spans
    assert received.keys() == expected.keys()
    for span_id, span in expected.items():
        wire = received[span_id]
        assert wire.name == span.name
        assert int.from_bytes(wire.trace_id, "big") == span.trace_id
        assert int.from_bytes(wire.parent_span_id, "big") == (span.parent_id or 0)
        assert (wire.start_time_unix_nano, wire.end_time_unix_nano) == (span.start_ns, span.end_ns)
        assert {value.key for value in wire.attributes} == set(span.attributes)
        assert [event.name for event in wire.events] == [event.name for event in span.events]
        assert [int.from_bytes(link.span_id, "big") for link in wire.links] == [link.span_id for link in span.links]
        assert (wire.status.code == 2) == span.is_error
    found = receiver.requests[0].resource_spans[0]
    resource_attributes = {value.key: value.value.string_value for value in found.resource.attributes}
    assert resource_attributes["service.name"] == "resilience"
    assert resource_attributes["service.version"] == resilience.__version__
    assert resource_attributes["host.name"] == "node"
    assert resource_attributes["deployment.environment"] == "test"
    assert found.scope_spans[0].scope.name == "resilience"
    assert receiver.headers[0]["x-tenant"] == "me"
    assert kinds(emitted) == [events.ExportStarted]


def test_service_name_of_the_environment_wins(
    told: Job, tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{receiver.endpoint}/v1/traces")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "my-training")
        exports = started(told.write(tmp_path / "run"), emitted)
        exports.close(30.0)
    names = [value.value.string_value for value in receiver.requests[0].resource_spans[0].resource.attributes]
    assert "my-training" in names


def test_successor_lets_no_span_leave_that_ended_long_before_it(
    tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    long_ago = job([Fault("exception", 1, 0)], started_ns=time.time_ns() - 3600 * 10**9)
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        exports = started(long_ago.write(tmp_path / "run"), emitted)
        exports.close(30.0)
        assert receiver.requests == []
    assert exports._exports.metrics.samples()["resilience_restart_iterations_total", ("inprocess", "interrupted")] == 1


@pytest.mark.parametrize("batch", [10, 512])
@pytest.mark.parametrize("mood", ["garbage", "reject"])
def test_receiver_that_does_not_take_spans_costs_spans_that_are_counted(
    mood: str, batch: int, told: Job, tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """batch: also so small that most are lost after the first loss was told."""
    with receiving(mood) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", str(batch))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        exports = started(told.write(tmp_path / "run"), emitted)
        exports.poll()
        assert receiver.has_come.wait(30)
        exports.close(30.0)
    assert lost(emitted) == len(spans_of(told))
    assert kinds(emitted).count(events.ExportFailed) == 1


def lost(emitted: list[events.Event]) -> int:
    return sum(
        event.count for event in emitted if isinstance(event, events.TelemetryDropped) and event.signal == "span"
    )


def test_dead_receiver_costs_spans_that_are_counted(
    told: Job, tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    exports = started(told.write(tmp_path / "run"), emitted)
    exports.close(30.0)
    assert lost(emitted) == len(spans_of(told))
    assert settled(exports._exports.metrics.samples()) == replayed(told)


Samples = dict[tuple[str, tuple[str, ...]], float]


def settled(samples: Samples) -> Samples:
    """The samples that say what happened, without those of the folder and what goes on with the clock: the records have
    another one, and a counter of time that was read too late never falls. `test_rank_time` is about those."""
    of_folder = "resilience_run_info", "resilience_run_folder_up"
    moving = ("resilience_rank_silence_seconds", "resilience_lost_seconds_total", *of_folder)
    return {key: value for key, value in samples.items() if key[0] not in moving}


def replayed(told: Job) -> Samples:
    view = MetricView(time.monotonic_ns)
    for record in told.records:
        view.take(record)
    return settled(view.samples())


def test_receiver_that_stalls_holds_nobody_up_and_the_queue_is_bounded(
    told: Job, tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    with receiving("stall") as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        exports = started(told.write(tmp_path / "run"), emitted)
        exports.poll()
        assert receiver.has_come.wait(30)
        exports.close(0.2)
        # The request is still under way: what came back did not wait for it.
        assert not receiver.may_go.is_set()
        reasons = {event.reason: event.count for event in emitted if isinstance(event, events.TelemetryDropped)}
    total = len(spans_of(told))
    assert reasons.keys() == {"queue full", "closing"}
    assert sum(reasons.values()) == total
    assert reasons["closing"] <= 16 + 8  # the queue, and the request that is under way


def test_protocol_that_does_not_exist_is_reported_and_nothing_else_happens(
    tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")
    started(tmp_path, emitted).close(30.0)
    (failed,) = emitted
    assert isinstance(failed, events.ExportFailed)
    assert "'carrier-pigeon', expected one of http/protobuf, grpc" in failed.reason


def test_exporter_that_cannot_start_is_reported_and_nothing_else_happens(
    tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ValueError("no such certificate")

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    module = SimpleNamespace(OTLPSpanExporter=refuse)
    monkeypatch.setitem(sys.modules, otlp.EXPORTERS["http/protobuf"], module)
    started(tmp_path, emitted).close(30.0)
    assert emitted == [events.ExportFailed("otlp", "cannot start: ValueError: no such certificate", is_at_start=True)]


def test_exporter_that_is_not_installed_is_reported_with_what_to_do(
    tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, otlp.EXPORTERS["http/protobuf"], None)
    started(tmp_path, emitted).close(30.0)
    (failed,) = emitted
    assert isinstance(failed, events.ExportFailed)
    assert "pip install 'torch-resilience[otlp]'" in failed.reason


def test_leader_whose_rank_died_at_the_end_of_the_job_sends_what_the_others_tell_then(
    tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = job([Fault("kill", 1, 0)], world=3, started_ns=time.time_ns())
    folder = tmp_path / "run"
    (folder / "records").mkdir(parents=True)
    texts = {rank: list(map(to_line, records)) for rank, records in told.files.items()}
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        exports = started(folder, emitted)
        for rank, lines in texts.items():
            (folder / "records" / f"node-{rank}.jsonl").write_bytes(b"".join(lines if rank == 1 else lines[:-9]))
        closing = threading.Thread(target=exports.close, args=(60.0,))
        closing.start()
        for rank in (0, 2):
            with (folder / "records" / f"node-{rank}.jsonl").open("ab") as file:
                file.write(b"".join(texts[rank][-9:]))
        closing.join()
        assert receiver.spans.keys() == spans_of(told).keys()


# -- metrics -----------------------------------------------------------------------------------


def test_metrics_are_served_as_text_and_openmetrics_and_left_as_a_snapshot(
    told: Job, tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESILIENCE_METRICS_PORT", "0")
    folder = told.write(tmp_path / "run")
    exports = started(folder, emitted)
    exports.poll()
    port = port_of(emitted)
    line = 'resilience_restart_iterations_total{layer="inprocess",outcome="interrupted"} 3.0'
    assert line in scrape(port)
    assert scrape(port, "application/openmetrics-text").endswith("# EOF\n")
    (entry,) = json.loads((folder.parent / ".targets" / "run@@node.json").read_bytes())
    assert entry == {
        "targets": [f"127.0.0.1:{port}"],
        "labels": {"job_id": "run", "node": "node", "__param_job_id": "run"},
    }
    exports.close(30.0)
    assert line in (folder / "metrics" / "node.prom").read_text()
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_port_that_is_taken_gives_way_to_the_next_free_one_and_says_so(
    tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wanted = taken.getsockname()[1]
        monkeypatch.setenv("RESILIENCE_METRICS_PORT", str(wanted))
        exports = started(tmp_path, emitted)
        exports.poll()
        (begun,) = emitted
        assert isinstance(begun, events.ExportStarted)
        assert port_of(emitted) > wanted
        assert begun.note == f"port {wanted} is taken"
        assert "resilience_monitor_up" in scrape(port_of(emitted))
        exports.close()


def test_port_that_is_no_number_is_reported_and_nothing_else_happens(
    tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESILIENCE_METRICS_PORT", "http")
    assert NodeExports.start(tmp_path, "node", emitted.append) is None
    assert kinds(emitted) == [events.ExportFailed]


def test_nothing_configured_is_nothing_started(tmp_path: Path, emitted: list[events.Event]) -> None:
    assert NodeExports.start(tmp_path, "node", emitted.append) is None
    assert emitted == []
    assert list(tmp_path.iterdir()) == []


# -- files -------------------------------------------------------------------------------------


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENCE_METRICS_PORT", "0")


@pytest.mark.usefixtures("serving")
def test_records_are_taken_once_however_they_come(told: Job, tmp_path: Path, emitted: list[events.Event]) -> None:
    """Files grow between polls, in the middle of a line too, and appear late."""
    folder = tmp_path / "run"
    (folder / "records").mkdir(parents=True)
    exports = started(folder, emitted)
    texts = {rank: b"".join(map(to_line, records)) for rank, records in told.files.items()}
    parts = 7
    for part in range(parts):
        for rank, text in texts.items():
            if part == 0 and rank == 2:
                continue
            start = 0 if rank == 2 and part == 1 else len(text) * part // parts
            with (folder / "records" / f"node-{rank}.jsonl").open("ab") as file:
                file.write(text[start : len(text) * (part + 1) // parts])
        exports._list_at = 0.0
        exports.poll()
    exports.close()
    assert settled(exports._exports.metrics.samples()) == replayed(told)


@pytest.mark.usefixtures("serving")
def test_successor_has_the_numbers_of_its_predecessor(told: Job, tmp_path: Path, emitted: list[events.Event]) -> None:
    folder = told.write(tmp_path / "run")
    first, second = started(folder, emitted), started(folder, emitted)
    first.close()
    second.close()
    assert settled(first._exports.metrics.samples()) == settled(second._exports.metrics.samples()) == replayed(told)


@pytest.mark.usefixtures("serving")
def test_files_of_other_nodes_and_lines_that_are_torn_are_left_out(
    told: Job, tmp_path: Path, emitted: list[events.Event]
) -> None:
    folder = told.write(tmp_path / "run")
    (folder / "records" / "node-g1-0.jsonl").write_bytes(to_line(told.records[0]))
    (folder / "records" / "node-7.jsonl").mkdir()
    with (folder / "records" / "node-0.jsonl").open("ab") as file:
        file.write(b'{"sequence": 9, "wall\n\xff\xfe\n\n{"event": 1}\n{"torn')
    exports = started(folder, emitted)
    exports.poll()
    exports.close()
    assert settled(exports._exports.metrics.samples()) == replayed(told)
    assert kinds(emitted) == [events.ExportStarted]


@pytest.mark.usefixtures("serving")
def test_folder_that_cannot_be_written_costs_the_snapshot_only(
    told: Job, tmp_path: Path, emitted: list[events.Event]
) -> None:
    folder = told.write(tmp_path / "run")
    (folder / "metrics").write_text("a file where a folder should be")
    exports = started(folder, emitted)
    exports.poll()
    assert "resilience_events_total" in scrape(port_of(emitted))
    exports.close()


@pytest.mark.usefixtures("serving")
def test_full_disk_costs_the_snapshot_only(told: Job, tmp_path: Path, emitted: list[events.Event]) -> None:
    folder = told.write(tmp_path / "run")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    exports = started(folder, emitted)
    exports.poll()
    for path in (folder / "metrics").iterdir():
        path.unlink()
    exports._snapshot_at = 0.0
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        exports.poll()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((folder / "metrics").iterdir()) == []
    assert "resilience_events_total" in scrape(port_of(emitted))
    exports.close()


@pytest.mark.usefixtures("serving")
def test_error_in_a_metrics_view_is_reported_once_and_not_raised(
    told: Job, tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    exports = started(told.write(tmp_path / "run"), emitted)

    def broken(*_: object) -> None:
        raise KeyError("a bug of ours")

    monkeypatch.setattr(exports._exports.metrics, "take", broken)
    exports.poll()
    exports._read = dict.fromkeys(exports._read, 0)
    exports.poll()
    failed = [event for event in emitted if isinstance(event, events.ExportFailed)]
    assert len(failed) == 1
    assert "a bug of ours" in failed[0].reason
    exports.close()


def test_neither_logger_nor_emitter_nor_setup_load_an_exporter() -> None:
    code = (
        "import sys, resilience.telemetry.log, resilience.telemetry.emitter, resilience.telemetry.exporters\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded & {'structlog', 'opentelemetry', 'prometheus_client', 'requests', 'torch'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- a real job --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(fork_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningJob, Receiver]]:
    """Two ranks, one of which fails once, with a receiver beside them."""
    from tests.support.ranks import started as started_ranks

    env = {"RESILIENCE_METRICS_PORT": "0", "OTEL_BSP_SCHEDULE_DELAY": "20", "OTEL_EXPORTER_OTLP_TIMEOUT": "30"}
    kwargs = {"faults": [{"kind": "exception", "rank": 1, "iteration": 0, "step": 5}]}
    with receiving() as receiver:
        env["OTEL_EXPORTER_OTLP_ENDPOINT"] = receiver.endpoint
        folder = tmp_path_factory.mktemp("exporting")
        (folder / "textfile").mkdir()
        env["RESILIENCE_METRICS_TEXTFILE"] = str(folder / "textfile")
        with started_ranks(fork_server, folder, 2, "tests.process.jobs:train_and_export", kwargs, env) as running:
            running.wait()
            yield running, receiver


def test_spans_of_a_real_job_are_those_of_its_replay(ran: tuple[RunningJob, Receiver]) -> None:
    running, receiver = ran
    view = SpanView()
    replay = {span.span_id: span for record in load(running.run).records for span in view.take(record)}
    assert receiver.spans.keys() == replay.keys()
    for span_id, wire in receiver.spans.items():
        span = replay[span_id]
        assert (wire.name, wire.start_time_unix_nano, wire.end_time_unix_nano) == (
            span.name,
            span.start_ns,
            span.end_ns,
        )
    seen = {(span.name, span.attributes["resilience.rank.initial"]) for span in replay.values()}
    assert {("restart", 0), ("restart", 1), ("interruption", 1), ("inprocess.iteration", 0)} <= seen


def test_all_spans_of_a_real_job_name_the_version_that_sent_them(ran: tuple[RunningJob, Receiver]) -> None:
    _, receiver = ran
    resources = [each.resource for request in receiver.requests for each in request.resource_spans]
    named = [{value.key: value.value.string_value for value in resource.attributes} for resource in resources]
    assert {(each.get("service.name"), each.get("service.version")) for each in named} == {
        ("resilience", resilience.__version__)
    }


def test_metrics_of_a_real_job_are_those_of_its_replay(ran: tuple[RunningJob, Receiver]) -> None:
    running, _ = ran
    (snapshot,) = running.run.glob("metrics/*.prom")
    served = dict(line.rsplit(" ", 1) for line in snapshot.read_text().splitlines() if not line.startswith("#"))
    view = MetricView()
    for record in load(running.run).records:
        view.take(record)
    expected = view.samples()
    assert expected["resilience_restart_iterations_total", ("inprocess", "interrupted")] == 1
    for metric in ("resilience_restart_iterations_total", "resilience_interruptions_total"):
        for (name, labels), value in expected.items():
            if name == metric:
                (line,) = [line for line in served if line.startswith(name) and all(f'"{x}"' in line for x in labels)]
                assert float(served[line]) == value


def test_last_numbers_of_a_real_job_include_what_all_ranks_did_last(ran: tuple[RunningJob, Receiver]) -> None:
    running, _ = ran
    (snapshot,) = running.run.glob("metrics/*.prom")
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(snapshot.read_text())
        for sample in family.samples
    }
    recorded = [durations.read_histograms(path).timings() for path in running.run.glob("timings/*.hist")]
    assert len(recorded) == 2
    count = sum(timings.sections["reduce"].count for timings in recorded)
    assert samples["resilience_section_duration_seconds_count", "completed", "reduce"] == count
    last_step = STEPS - 1
    assert [samples["resilience_rank_step", str(rank)] for rank in range(2)] == [last_step, last_step]


def test_file_for_node_exporter_of_a_real_job_has_its_counters(ran: tuple[RunningJob, Receiver]) -> None:
    running, _ = ran
    (snapshot,) = running.run.glob("metrics/*.prom")
    (collected,) = (running.folder / "textfile").iterdir()
    own = {"job_id": running.run.name, "node": snapshot.stem}
    expected = {
        (sample.name, *sorted((sample.labels | own).items())): sample.value
        for family in text_string_to_metric_families(snapshot.read_text())
        for sample in family.samples
        if family.type != "gauge"
    }
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(collected.read_text())
        for sample in family.samples
    }
    assert found.keys() >= expected.keys()  # it says how the job ended, too
    name = "resilience_restart_iterations_total"
    assert {key: value for key, value in found.items() if key[0] == name} == {
        key: value for key, value in expected.items() if key[0] == name
    }
