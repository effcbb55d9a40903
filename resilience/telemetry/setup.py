"""How do metrics and spans get out?  The exporters of a node, in one of its monitors, or in its agent.

Under the launcher the agent exports for its node, all the time and for all cycles, and monitors never do;
without one, the leading monitor of the node does. `NodeExports` tails the record files of its node and feeds
them to the views: whoever takes over after the death of its predecessor reads the files from the start and
has the same counters. Spans leave over OTLP when the OTEL_* variables name an endpoint, metrics are served on the
loopback address when RESILIENCE_METRICS_PORT is set; without either, `start` answers None and nothing is
imported.

Fail-open: nothing here raises, blocks or steers. A collector that is dead, slow or answers rubbish costs
spans, which are counted (`TelemetryDropped`); a full or read-only disk costs the snapshots. `close` is
bounded.

After a takeover, spans that ended more than MARGIN seconds before it are taken to have left already. The
last ones may leave twice; their ids are the same, so a back end that knows ids keeps one."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import msgspec

from resilience.adapters import files
from resilience.adapters.environment import Exporting, Settings, monitor_socket
from resilience.core import events
from resilience.core.records import Record
from resilience.errors import ConfigurationError
from resilience.telemetry import signs, timings
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.recording import RecordTail
from resilience.telemetry.sending import Emit, SpanSender
from resilience.telemetry.span import Trace, parse_traceparent
from resilience.telemetry.spans import SpanView

MARGIN = 15.0  # seconds before the start of an exporter from which on it lets spans leave
LOOPBACK = "127.0.0.1"
PORTS_TRIED = 32  # from RESILIENCE_METRICS_PORT upwards
SNAPSHOT_EVERY = 15.0  # seconds between two looks at the timing histograms, and two metric snapshots
LIST_AT_MOST_EVERY = 60.0  # seconds; new files of a node appear when it starts, seldom later
POLL_EVERY = 0.5  # seconds between two looks of the agent's at the record files
LINGER = 0.02  # seconds between two looks at the files of ranks that are about to end

Call = tuple[int, int, int]  # attempt, cycle, call


class NodeExports:
    """What one node exports: its record files, seen through the views."""

    def __init__(self, folder: Path, node: str, exports: Exports, is_agents: bool = False) -> None:
        self._is_agents = is_agents
        self._folder = folder
        self._node = node
        self._exports = exports
        self._pattern = re.compile(rf"{re.escape(node)}-(\d+|agent)\.jsonl")
        self._read: dict[Path, RecordTail] = {}
        self._calls: dict[Path, Call] = {}  # of ranks whose process has not ended: the call they are in
        self._completed: set[Call] = set()
        self._list_at = 0.0
        self._list_pause = 1.0
        self._snapshot_at = 0.0
        exports.metrics.look = self._signs

    @classmethod
    def start(
        cls, folder: Path, node: str, emit: Emit, is_agents: bool = False, port: int | None = None
    ) -> NodeExports | None:
        """Start what the environment asks for; None if it asks for nothing, or somebody else exports.

        folder: the run folder. emit: takes events about the exporting itself. is_agents: called by the
        launcher's agent. port: that of the metrics, in place of RESILIENCE_METRICS_PORT. Never raises."""
        if not is_agents and monitor_socket() is not None:
            return None  # this node's agent exports
        exports = Exports.from_environment(node, emit, is_agents, port)
        if exports is None:
            return None
        if exports.port is not None:
            _announce(folder, node, exports.port)
        return cls(folder, node, exports, is_agents)

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
        for path, tail in self._read.items():
            added = tail.added()
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

    def _signs(self) -> dict[int, signs.Signs]:
        """What the node's ranks show now; asked for by a scrape, in a thread of its own."""
        found: dict[int, signs.Signs] = {}
        for path in list(self._read):
            rank = path.stem.rpartition("-")[2]
            if rank.isdecimal():
                try:
                    found[int(rank)] = signs.read(signs.path_of(self._folder, self._node, int(rank)))
                except (OSError, msgspec.DecodeError):
                    continue  # it shows nothing yet
        return found

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
        if self._is_agents:  # nobody takes over: Prometheus need not look for it any more
            _sd_file(self._folder, self._node).unlink(missing_ok=True)

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
            self._read.setdefault(path, RecordTail(path))

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


class AgentExports:
    """The exporters of the launcher's agent, at work in a thread of their own until `close`."""

    def __init__(self, folder: Path, node: str, emit: Emit, port: int | None) -> None:
        self._place = (folder, node, emit, port)
        self._done = threading.Event()
        self._close_s = 0.0
        self._thread = threading.Thread(target=self._run, name="resilience-exports", daemon=True)

    @classmethod
    def start(cls, folder: Path, node: str, emit: Emit, port: int | None = None) -> AgentExports | None:
        """Export for this node from now on; None, and no thread, if nothing is asked for.

        To be called after the agent's last fork. folder: the run folder. emit: takes events about the
        exporting itself, from any thread. port: of the metrics, in place of RESILIENCE_METRICS_PORT."""
        if Exporting.from_environment().protocol is None and port is None:
            try:
                if Settings.from_environment().metrics_port is None:
                    return None
            except ConfigurationError:
                pass  # told by the thread
        made = cls(folder, node, emit, port)
        made._thread.start()
        return made

    def close(self, timeout: float = 2.0) -> None:
        """Take the last records, and let the exporters finish, within about `timeout` seconds."""
        self._close_s = timeout
        self._done.set()
        self._thread.join(timeout + LINGER)

    def _run(self) -> None:
        folder, node, emit, port = self._place
        exports = NodeExports.start(folder, node, emit, is_agents=True, port=port)
        if exports is None:
            return
        while not self._done.wait(POLL_EVERY):
            exports.poll()
        exports.close(self._close_s)


class Exports:
    """The exporters: a sender of spans, a server of metrics, and the views that feed them."""

    def __init__(
        self,
        emit: Emit,
        sender: SpanSender | None = None,
        server: _MetricsServer | None = None,
        metrics: MetricView | None = None,
        parent: Trace | None = None,
        since_ns: int = 0,
        is_launched: bool = False,
    ) -> None:
        self.metrics = metrics or MetricView(time.monotonic_ns)
        self._emit = emit
        self._spans = SpanView(parent, is_launched)
        self._sender = sender
        self._server = server
        self._since_ns = since_ns
        self._has_failed = False

    @classmethod
    def from_environment(
        cls, node: str, emit: Emit, is_launched: bool = False, port: int | None = None
    ) -> Exports | None:
        """Start what the environment asks for; None if it asks for nothing. Never raises.

        is_launched: the node's ranks belong to the launcher. port: as for `NodeExports.start`."""
        exporting = Exporting.from_environment()
        settings = Settings()
        try:
            settings = Settings.from_environment()
        except ConfigurationError as error:
            emit(events.ExportFailed("prometheus", f"cannot start: {error}"))
        port = settings.metrics_port if port is None else port
        if exporting.protocol is None and port is None:
            return None
        metrics = MetricView(time.monotonic_ns, settings.metrics_ranks)
        sender = None if exporting.protocol is None else SpanSender(exporting, node, emit)
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
            is_launched,
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
    files.replace(_sd_file(folder, node), msgspec.json.encode(entry))


def _sd_file(folder: Path, node: str) -> Path:
    return folder / "metrics" / f"{node}.sd.json"
