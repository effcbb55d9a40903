"""How do metrics and spans get out?  The exporters of a node, in its monitor or agent only.

`NodeExports` tails the record files of its node, which the monitors write, and feeds them to the views:
whoever takes over after the death of its predecessor reads the files from the start and has the same
counters. Spans leave over OTLP when the OTEL_* variables name an endpoint, metrics are served on the
loopback address when RESILIENCE_METRICS_PORT is set; without either, `start` answers None and nothing is
imported.

Fail-open: nothing here raises, blocks or steers. A collector that is dead, slow or answers rubbish costs
spans, which are counted (`TelemetryDropped`); a full or read-only disk costs the snapshots. `close` is
bounded.

After a takeover, spans that ended more than MARGIN seconds before it are taken to have left already. The
last ones may leave twice; their ids are the same, so a back end that knows ids keeps one."""

from __future__ import annotations

import collections
import importlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from resilience.adapters import files
from resilience.adapters.environment import Exporting, Settings
from resilience.core import events
from resilience.core.records import Record, from_line
from resilience.errors import ConfigurationError
from resilience.telemetry import timings
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.spans import SCOPE, Span, SpanView, Trace, parse_traceparent

MARGIN = 15.0  # seconds before the start of an exporter from which on it lets spans leave
LOOPBACK = "127.0.0.1"
PORTS_TRIED = 32  # from RESILIENCE_METRICS_PORT upwards
SNAPSHOT_EVERY = 15.0  # seconds between two looks at the timing histograms, and two metric snapshots
LIST_AT_MOST_EVERY = 60.0  # seconds; new files of a node appear when it starts, seldom later
READ_AT_ONCE = 4 << 20  # bytes of one file a poll
LINGER = 0.02  # seconds between two looks at the files of ranks that are about to end
TELL_EVERY = 15.0  # seconds between two records about lost spans

Emit = Callable[[events.Event], None]
Call = tuple[int, int, int]  # attempt, cycle, call
_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}


class NodeExports:
    """What one node exports: its record files, seen through the views."""

    def __init__(self, folder: Path, node: str, exports: Exports) -> None:
        self._folder = folder
        self._node = node
        self._exports = exports
        self._pattern = re.compile(rf"{re.escape(node)}-(\d+|agent)\.jsonl")
        self._read: dict[Path, int] = {}  # bytes of each file that are taken
        self._calls: dict[Path, Call] = {}  # of ranks whose process has not ended: the call they are in
        self._completed: set[Call] = set()
        self._list_at = 0.0
        self._list_pause = 1.0
        self._snapshot_at = 0.0

    @classmethod
    def start(cls, folder: Path, node: str, emit: Emit) -> NodeExports | None:
        """Start what the environment asks for; None if it asks for nothing.

        folder: the run folder. emit: takes events about the exporting itself. Never raises."""
        exports = Exports.from_environment(node, emit)
        if exports is None:
            return None
        if exports.port is not None:
            _announce(folder, node, exports.port)
        return cls(folder, node, exports)

    def poll(self) -> None:
        """Take what was added to the node's files since the last time. Costs a `stat` a file. Never raises."""
        try:
            self._poll()
        except Exception as error:  # the edge to whoever polls: what the views cannot digest is not its affair
            self._exports.fail(f"cannot digest the account: {type(error).__name__}: {error}"[:500])

    def _poll(self) -> None:
        now = time.monotonic()
        if now >= self._list_at:
            self._list(now)
        batch: list[Record] = []
        for path in self._read:
            added = self._added(path)
            batch += added
            for record in added:
                self._note(path, record)
        # Between files only causality counts, and one clock orders all records of a node.
        batch.sort(key=lambda record: record.mono_ns)
        for record in batch:
            self._exports.take(record)
        if now >= self._snapshot_at:
            self._snapshot_at = now + SNAPSHOT_EVERY
            self._take_timings()
            self._write_snapshot()

    def close(self, timeout: float = 2.0) -> None:
        """Take the last records and let the exporters finish, at most `timeout` seconds.

        Once a call is completed on one rank it is on all, and they end at about the same time: they are
        waited for, half of that time at most. For ranks that run on, the next leader exports."""
        deadline = time.monotonic() + timeout
        self._list_at = 0.0
        self.poll()
        while self._completed & set(self._calls.values()) and time.monotonic() < deadline - timeout / 2:
            time.sleep(LINGER)
            self.poll()
        self._snapshot_at = 0.0
        self.poll()
        self._exports.close(max(0.0, deadline - time.monotonic()))

    def _note(self, path: Path, record: Record) -> None:
        """Remember which ranks are about to end."""
        call = (record.origin.attempt, record.origin.cycle, record.origin.call)
        match record.event:
            case events.CallStarted():
                self._calls[path] = call
            case events.IterationEnded(outcome="completed"):
                self._completed.add(call)
            case events.RankExited():
                self._calls.pop(path, None)

    def _list(self, now: float) -> None:
        """Look for files of the node, less and less often: a folder may hold those of 10,000 ranks."""
        self._list_pause = min(self._list_pause * 2, LIST_AT_MOST_EVERY)
        self._list_at = now + self._list_pause
        try:
            names = [path for path in (self._folder / "records").iterdir() if self._pattern.fullmatch(path.name)]
        except OSError:
            return
        for path in sorted(names):
            self._read.setdefault(path, 0)

    def _added(self, path: Path) -> list[Record]:
        """The complete records that were appended to a file. A line that is none was torn: left out."""
        taken = self._read[path]
        try:
            if path.stat().st_size <= taken:
                return []
            with path.open("rb") as file:
                file.seek(taken)
                whole, newline, rest = file.read(READ_AT_ONCE).rpartition(b"\n")
        except OSError:
            return []
        if not newline and len(rest) == READ_AT_ONCE:
            self._read[path] = taken + len(rest)  # no line of ours is that long
            return []
        self._read[path] = taken + len(whole) + len(newline)
        found = []
        for line in whole.split(b"\n"):
            try:
                found.append(from_line(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
        return found

    def _take_timings(self) -> None:
        total = timings.Timings()
        for path in self._read:
            try:
                total.merge(timings.read(self._folder / "timings" / f"{path.stem}.json"))
            except (OSError, msgspec.DecodeError):
                continue  # not written yet, or it cannot be read now
        self._exports.metrics.take_timings(total)

    def _write_snapshot(self) -> None:
        text = self._exports.exposition()
        if text is not None:
            files.replace(self._folder / "metrics" / f"{self._node}.prom", text)


class Exports:
    """The exporters: a sender of spans, a server of metrics, and the views that feed them."""

    def __init__(
        self,
        emit: Emit,
        sender: _SpanSender | None = None,
        server: _MetricsServer | None = None,
        metrics: MetricView | None = None,
        parent: Trace | None = None,
        since_ns: int = 0,
    ) -> None:
        self.metrics = metrics or MetricView(time.monotonic_ns)
        self._emit = emit
        self._spans = SpanView(parent)
        self._sender = sender
        self._server = server
        self._since_ns = since_ns
        self._has_failed = False

    @classmethod
    def from_environment(cls, node: str, emit: Emit) -> Exports | None:
        """Start what the environment asks for; None if it asks for nothing. Never raises."""
        exporting = Exporting.from_environment()
        try:
            port = Settings.from_environment().metrics_port
        except ConfigurationError as error:
            emit(events.ExportFailed("prometheus", f"cannot start: {error}"))
            port = None
        if exporting.protocol is None and port is None:
            return None
        metrics = MetricView(time.monotonic_ns)
        sender = None if exporting.protocol is None else _SpanSender(exporting, node, emit)
        server = None if port is None else _start_server(port, metrics, emit)
        if sender is None and server is None:
            return None
        return cls(
            emit,
            sender,
            server,
            metrics,
            parse_traceparent(exporting.traceparent),
            time.time_ns() - round(MARGIN * 1e9),
        )

    @property
    def port(self) -> int | None:
        """The port on which metrics are served."""
        return None if self._server is None else self._server.port

    def take(self, record: Record) -> bool:
        """Feed a record to the views. Never blocks; answers whether all of it was taken."""
        self.metrics.take(record)
        spans = [span for span in self._spans.take(record) if span.end_ns >= self._since_ns]
        return self._sender is None or all([self._sender.offer(span) for span in spans])

    def fail(self, reason: str) -> None:
        """Put on record, once, that something here is broken."""
        if not self._has_failed:
            self._has_failed = True
            self._emit(events.ExportFailed("prometheus" if self._sender is None else "otlp", reason))

    def exposition(self) -> bytes | None:
        """Return the metrics as Prometheus text, None where they are not served."""
        return None if self._server is None else self._server.exposition()

    def close(self, timeout: float) -> None:
        """Let the exporters finish, at most `timeout` seconds in all."""
        deadline = time.monotonic() + timeout
        if self._sender is not None:
            self._sender.close(max(0.0, deadline - time.monotonic()))
        if self._server is not None:
            self._server.close(max(0.1, deadline - time.monotonic()))


# -- spans -------------------------------------------------------------------------------------


class _SpanSender:
    """Sends spans from a thread of its own, out of a bounded queue. The thread also loads the exporter,
    which takes a second now and then, so that whoever starts this goes on at once."""

    def __init__(self, exporting: Exporting, node: str, emit: Emit) -> None:
        self._exporting = exporting
        self._node = node
        self._emit = emit
        self._is_off = False  # the exporter could not be loaded, and has said so
        self._queue: collections.deque[Span] = collections.deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_failing = False
        self._lost: collections.Counter[str] = collections.Counter()
        self._tell_at = 0.0
        self._thread = threading.Thread(target=self._run, name="resilience-spans", daemon=True)
        self._thread.start()

    def offer(self, span: Span) -> bool:
        """Queue a span; answers False if the queue is full, and counts it."""
        with self._changed:
            if self._is_off:
                return False
            if len(self._queue) >= self._exporting.queue:
                self._lost["queue full"] += 1
                return False
            self._queue.append(span)
            if len(self._queue) >= self._exporting.batch:
                self._changed.notify()
        return True

    def close(self, timeout: float) -> None:
        """Send what is queued, at most `timeout` seconds; what is left then is counted as lost."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout)
        with self._changed:
            if self._queue:
                self._lost["closing"] += len(self._queue)
                self._queue.clear()
        # The thread may be inside a request that does not end; it is a daemon and holds nobody up.
        self._tell(0.0)

    def _run(self) -> None:
        loaded = _load(self._exporting, self._node, self._emit)
        if loaded is None:
            with self._changed:
                self._is_off = True
                self._queue.clear()
            return
        exporter, convert = loaded
        while batch := self._next_batch():
            self._account_for(batch, _export(exporter, [convert(span) for span in batch]))
            self._tell(TELL_EVERY)
        _shut_down(exporter)

    def _next_batch(self) -> list[Span]:
        """Wait until a batch is full, the delay is over, or the end; () is the end."""
        with self._changed:
            while not self._queue and not self._is_closing:
                self._changed.wait(self._exporting.delay_s)
            deadline = time.monotonic() + self._exporting.delay_s
            while len(self._queue) < self._exporting.batch and not self._is_closing:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            count = min(len(self._queue), self._exporting.batch)
            return [self._queue.popleft() for _ in range(count)]

    def _account_for(self, batch: Sequence[Span], is_sent: bool) -> None:
        if not is_sent:
            with self._changed:
                self._lost["export failed"] += len(batch)
            if not self._is_failing:
                self._emit(events.ExportFailed("otlp", f"{self._exporting.endpoint} does not take spans"))
        self._is_failing = not is_sent

    def _tell(self, pause: float) -> None:
        """Put losses on record, now and then."""
        now = time.monotonic()
        if not self._lost or now < self._tell_at:
            return
        self._tell_at = now + pause
        with self._changed:
            lost, self._lost = self._lost, collections.Counter()
        for reason, count in sorted(lost.items()):
            self._emit(events.TelemetryDropped("span", reason, count))


def _export(exporter: Any, spans: Sequence[Any]) -> bool:
    try:
        return getattr(exporter.export(spans), "name", "") == "SUCCESS"
    except Exception:  # the exporter's edge: whatever it raises costs spans only, and they are counted
        return False


def _shut_down(exporter: Any) -> None:
    try:
        exporter.shutdown()
    except Exception:  # the exporter's edge: nothing is left to lose
        pass


def _load(exporting: Exporting, node: str, emit: Emit) -> tuple[Any, Callable[[Span], Any]] | None:
    """Return the exporter and what turns our spans into its; None, put on record, if it cannot start."""
    reason = ""
    try:
        exporter = importlib.import_module(_EXPORTERS[exporting.protocol or ""]).OTLPSpanExporter()
        loaded = exporter, _converter(node)
        emit(events.ExportStarted("otlp", exporting.endpoint))
        return loaded
    except KeyError:
        reason = f"protocol {exporting.protocol!r}, expected one of {', '.join(_EXPORTERS)}"
    except ImportError as error:
        reason = f"{error}; pip install 'torch-resilience[otlp]'"
    except Exception as error:  # the exporter reads many variables, and raises what it likes for a bad one
        reason = f"{type(error).__name__}: {error}"[:500]
    emit(events.ExportFailed("otlp", f"cannot start: {reason}"))
    return None


def _converter(node: str) -> Callable[[Span], Any]:
    """Return what turns our spans into OpenTelemetry's."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    from resilience import __version__

    named = Resource({"service.name": "resilience", "host.name": node})
    # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say wins; the SDK's own default name does not.
    found = {
        key: value
        for key, value in Resource.create().attributes.items()
        if not (key == "service.name" and str(value).startswith("unknown_service"))
    }
    resource = named.merge(Resource(found))
    scope = InstrumentationScope(SCOPE, __version__)

    def context(trace: int, span: int) -> SpanContext:
        return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def convert(span: Span) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=context(span.trace_id, span.span_id),
            parent=None if span.parent_id is None else context(span.trace_id, span.parent_id),
            resource=resource,
            attributes=span.attributes,
            events=[Event(event.name, event.attributes, event.at_ns) for event in span.events],
            links=[Link(context(to.trace_id, to.span_id), {"resilience.link.kind": to.kind}) for to in span.links],
            kind=SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR if span.is_error else StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=scope,
        )

    return convert


# -- metrics -----------------------------------------------------------------------------------


class _MetricsServer:
    """Serves the metrics of a view over HTTP, as Prometheus text or OpenMetrics."""

    def __init__(self, port: int, metrics: MetricView) -> None:
        """Raises: OSError if the port is taken."""
        import prometheus_client

        self._client = prometheus_client
        self._registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self._registry.register(metrics)
        self._server, _ = prometheus_client.start_http_server(port, LOOPBACK, self._registry)
        self.port: int = self._server.server_port

    def exposition(self) -> bytes:
        return self._client.generate_latest(self._registry)

    def close(self, timeout: float) -> None:
        # Ends within the server's own poll interval (0.5 s); scrapes under way have threads of their own.
        thread = threading.Thread(target=self._stop, name="resilience-metrics-close", daemon=True)
        thread.start()
        thread.join(timeout)

    def _stop(self) -> None:
        self._server.shutdown()
        self._server.socket.close()


def _start_server(port: int, metrics: MetricView, emit: Emit) -> _MetricsServer | None:
    last: OSError | None = None
    for candidate in range(port, min(port + PORTS_TRIED, 65536)) if port else (0,):
        try:
            server = _MetricsServer(candidate, metrics)
        except OSError as error:
            last = error
            continue
        except Exception as error:  # prometheus_client missing or broken: the job does not notice
            emit(events.ExportFailed("prometheus", f"cannot start: {type(error).__name__}: {error}"[:500]))
            return None
        note = "" if server.port == port or not port else f"port {port} is taken"
        emit(events.ExportStarted("prometheus", f"http://{LOOPBACK}:{server.port}/metrics", note))
        return server
    emit(events.ExportFailed("prometheus", f"cannot start: no port from {port} on is free: {last}"))
    return None


def _announce(folder: Path, node: str, port: int) -> None:
    """Leave an entry for Prometheus's file_sd."""
    entry = [{"targets": [f"{LOOPBACK}:{port}"], "labels": {"job_id": folder.name, "node": node}}]
    files.replace(folder / "metrics" / f"{node}.sd.json", msgspec.json.encode(entry))
