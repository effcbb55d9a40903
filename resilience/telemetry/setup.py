"""How do metrics and spans get out?  The exporters of a node, in one of its monitors, or in its agent.

Under the launcher the agent exports for its node, all the time and for all cycles, and monitors never do;
without one, the leading monitor of the node does. `NodeExports` tails the record files of its node and feeds
them to the views: whoever takes over after the death of its predecessor reads the files from the start and
has the same counters. Spans leave over OTLP when the OTEL_* variables name an endpoint, metrics are served when
RESILIENCE_METRICS_PORT is set, and written for node-exporter when RESILIENCE_METRICS_TEXTFILE is
(`telemetry.exposing`); without any of them, `start` answers None and nothing is imported.

Fail-open: nothing here raises, blocks or steers. A collector that is dead, slow or answers rubbish costs
spans, which are counted (`TelemetryDropped`); a full or read-only disk costs the snapshots. `close` is
bounded.

After a takeover, spans that ended more than MARGIN seconds before it are taken to have left already. The
last ones may leave twice; their ids are the same, so a back end that knows ids keeps one."""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from resilience.adapters import files
from resilience.adapters.background import WRITER
from resilience.adapters.environment import Exporting, Settings, has_agent
from resilience.core import events
from resilience.core.records import Record
from resilience.errors import ConfigurationError, DecodeError
from resilience.history.timeline import Timeline
from resilience.telemetry import durations, signs, timings
from resilience.telemetry.final_state import Outcome
from resilience.telemetry.metrics import About, MetricView
from resilience.telemetry.recording import RecordTail
from resilience.telemetry.sending import Emit, SpanSender
from resilience.telemetry.span import parse_traceparent
from resilience.telemetry.spans import SpanView

if TYPE_CHECKING:
    from resilience.telemetry.exposing import Exposition, MetricsServer, TextFile
    from resilience.telemetry.otlp_metrics import MetricSender

MARGIN = 15.0  # seconds before the start of an exporter from which on it lets spans leave
SNAPSHOT_EVERY = 15.0  # seconds between two looks at the timing histograms, two snapshots, two files for node-exporter
LIST_AT_MOST_EVERY = 60.0  # seconds; new files of a node appear when it starts, seldom later
POLL_EVERY = 0.5  # seconds between two looks of the agent's at the record files
CATCH_UP_LOOKS = 1000  # before the metrics are served; a look takes up to 4 MiB of each file
LINGER = 0.02  # seconds between two looks at the files of ranks that are about to end

Call = tuple[int, int, int]  # attempt, cycle, call


class NodeExports:
    """What one node exports: its record files, seen through the views."""

    def __init__(self, folder: Path, node: str, exports: Exports) -> None:
        self._folder = folder
        self._node = node
        self._exports = exports
        self._pattern = re.compile(rf"{re.escape(node)}-(\d+|agent)\.jsonl")
        self._read: dict[Path, RecordTail] = {}
        self._calls: dict[Path, Call] = {}  # of ranks whose process has not ended: the call they are in
        self._list_at = 0.0
        self._list_pause = 1.0
        self._snapshot_at = 0.0
        self._is_agents = exports.is_agents
        self._is_last = False
        self._has_caught_up = False
        exports.metrics.look = self._signs

    @classmethod
    def start(
        cls, folder: Path, node: str, emit: Emit, is_agents: bool = False, asked: Asked | None = None
    ) -> NodeExports | None:
        """Start what the environment asks for; None if it asks for nothing, or somebody else exports.

        folder: the run folder. emit: takes events about the exporting itself. is_agents: called by the
        launcher's agent. asked: what a command line says of the metrics. Never raises."""
        if not is_agents and has_agent():
            return None  # this node's agent exports
        exports = Exports.from_environment(folder, node, emit, is_agents, asked or Asked())
        return None if exports is None else cls(folder, node, exports)

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
        self._take_added()
        if not self._has_caught_up:
            # A scrape in the middle of the past would see smaller counters than an earlier exporter showed.
            for _ in range(CATCH_UP_LOOKS):
                if not self._take_added():
                    break
            self._has_caught_up = True
            self._take_timings()
            self._exports.serve()
        if now >= self._snapshot_at:
            self._snapshot_at = now + SNAPSHOT_EVERY
            self._take_timings()
            self._write_snapshot()
            self._exports.renew()

    def _take_added(self) -> bool:
        """Feed what the files have gained to the views; return True if there was anything."""
        batch: list[tuple[int, Record]] = []
        for path, tail in self._read.items():
            at = 0
            for record in tail.added():
                self._note(path, record)
                at = max(at, record.mono_ns)
                batch.append((at, record))
        # Between files only causality counts, and one clock orders all records of a node; the order within a file
        # is its own, so that a replay says the same: several processes write into it.
        batch.sort(key=lambda entry: entry[0])
        for _, record in batch:
            self._exports.take(record)
        return bool(batch)

    def _signs(self) -> dict[int, signs.Signs]:
        """What the node's ranks show now; asked for by a scrape, in a thread of its own."""
        found: dict[int, signs.Signs] = {}
        for path in list(self._read):
            rank = path.stem.rpartition("-")[2]
            if rank.isdecimal():
                try:
                    found[int(rank)] = signs.read(signs.path_of(self._folder, self._node, int(rank)))
                except (OSError, DecodeError):
                    continue  # it shows nothing yet
        return found

    def close(self, timeout: float = 2.0) -> None:
        """Take the last records and let the exporters finish, at most `timeout` seconds.

        Ranks that are still in a call are waited for, half of that time at most: the others of a rank that has
        ended do so at about the same time, and a rank may have died as all came to their end. For ranks that
        run on, the next leader exports."""
        deadline = time.monotonic() + timeout
        WRITER.flush(timeout / 2)  # the last records of this process
        self._list_at = 0.0
        self.poll()
        while self._calls and time.monotonic() < deadline - timeout / 2:
            time.sleep(LINGER)
            self.poll()
        self._snapshot_at, self._is_last = 0.0, True
        self.poll()
        # A monitor may close while ranks of the node go on, and the next one takes over. An agent that has not said how
        # the job ended is no better than one that was killed.
        outcome = self._exports.metrics.final.outcome or (None if self._is_agents else "left")
        self._exports.close(max(0.0, deadline - time.monotonic()), outcome)

    def _note(self, path: Path, record: Record) -> None:
        """Remember which ranks are about to end."""
        call = (record.origin.attempt, record.origin.cycle, record.origin.call)
        match record.event:
            case events.CallStarted():
                self._calls[path] = call
            case events.RankExited():
                self._calls.pop(path, None)
            case events.WorkerStarted():
                self._list_at, self._list_pause = 0.0, 1.0  # its monitor is about to begin a file

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
                found = durations.read_histograms(self._folder / "timings" / f"{path.stem}.hist")
                total.merge(found.timings())
            except (OSError, DecodeError):
                continue  # not written yet, or it cannot be read now
        self._exports.metrics.take_timings(total)

    def _write_snapshot(self) -> None:
        text = self._exports.exposition()
        if text is not None:
            files.replace(self._folder / "metrics" / f"{self._node}.prom", text)
        if self._exports.textfile is not None:
            self._exports.textfile.write(self._is_last)


class Asked(msgspec.Struct, frozen=True):
    """What a command line says of the metrics, in place of the settings METRICS_PORT, _HOST and _TEXTFILE."""

    port: int | None = None
    host: str | None = None
    textfile: str | None = None

    def beside(self, settings: Settings) -> Asked:
        """Return what holds: what is asked for here, else what the settings say."""
        return Asked(
            settings.metrics_port if self.port is None else self.port,
            self.host or settings.metrics_host,
            self.textfile or settings.metrics_textfile,
        )

    @property
    def is_nothing(self) -> bool:
        return self.port is None and self.textfile is None


class AgentExports:
    """The exporters of the launcher's agent, at work in a thread of their own until `close`."""

    def __init__(self, folder: Path, node: str, emit: Emit, asked: Asked) -> None:
        self._place = (folder, node, emit, asked)
        self._done = threading.Event()
        self._close_s = 0.0
        self._thread = threading.Thread(target=self._run, name="resilience-exports", daemon=True)

    @classmethod
    def start(cls, folder: Path, node: str, emit: Emit, asked: Asked | None = None) -> AgentExports | None:
        """Export for this node from now on; None, and no thread, if nothing is asked for.

        To be called after the agent's last fork. folder: the run folder. emit: takes events about the
        exporting itself, from any thread. asked: what the command line says of the metrics."""
        asked = asked or Asked()
        exporting = Exporting.from_environment()
        if exporting.protocol is None and exporting.metrics_protocol is None:
            try:
                if asked.beside(Settings.from_environment()).is_nothing:
                    return None
            except ConfigurationError:
                pass  # told by the thread
        made = cls(folder, node, emit, asked)
        made._thread.start()
        return made

    def close(self, timeout: float = 2.0) -> None:
        """Take the last records, and let the exporters finish, within about `timeout` seconds."""
        self._close_s = timeout
        self._done.set()
        self._thread.join(timeout + LINGER)

    def _run(self) -> None:
        folder, node, emit, asked = self._place
        exports = NodeExports.start(folder, node, emit, is_agents=True, asked=asked)
        if exports is None:
            return
        while not self._done.wait(POLL_EVERY):
            exports.poll()
        exports.close(self._close_s)


class Exports:
    """The exporters: a sender of spans, a server of metrics, a file of them, and the views that feed all of it."""

    def __init__(self, emit: Emit, metrics: MetricView, spans: SpanView, is_agents: bool = False) -> None:
        self.is_agents = is_agents
        self.metrics = metrics
        self.textfile: TextFile | None = None
        self._emit = emit
        self._spans = spans
        self._sender: SpanSender | None = None
        self._metric_sender: MetricSender | None = None
        self._exposition: Exposition | None = None
        self._server: MetricsServer | None = None
        self._serve: Callable[[], MetricsServer | None] | None = None  # what is asked for
        self._since_ns = time.time_ns() - round(MARGIN * 1e9)
        self._has_failed = False

    @classmethod
    def from_environment(cls, folder: Path, node: str, emit: Emit, is_launched: bool, asked: Asked) -> Exports | None:
        """Start what the environment asks for; None if it asks for nothing. Never raises.

        is_launched: the node's ranks belong to the launcher. asked: as for `NodeExports.start`."""
        exporting = Exporting.from_environment()
        settings = Settings()
        try:
            settings = Settings.from_environment()
        except ConfigurationError as error:
            emit(events.ExportFailed("prometheus", f"cannot start: {error}"))
        asked = asked.beside(settings)
        from resilience import __version__

        about = About(str(folder), __version__, str(getattr(sys.modules.get("torch"), "__version__", "")))
        parent = parse_traceparent(exporting.traceparent)
        timeline = Timeline(is_launched=is_launched)
        view = MetricView(time.monotonic_ns, settings.metrics_ranks, about, timeline, parent)
        made = cls(emit, view, SpanView(parent), is_launched)
        if exporting.protocol is not None:
            made._sender = SpanSender(exporting, node, emit)
        if exporting.metrics_protocol is not None:
            from resilience.telemetry.otlp_metrics import MetricSender  # a node that sends none loads nothing for it

            made._metric_sender = MetricSender(exporting, folder.name, node, view, emit)
        if not asked.is_nothing:
            made._expose(folder, node, asked)
        is_nothing = made._sender is None and made._metric_sender is None and made._exposition is None
        return None if is_nothing else made

    def _expose(self, folder: Path, node: str, asked: Asked) -> None:
        """Let the metrics be read where they are asked for."""
        from resilience.telemetry import exposing  # a node that exports nothing loads no server

        try:
            exposition = exposing.Exposition(self.metrics)
            if asked.textfile is not None:
                self.textfile = exposing.TextFile(Path(asked.textfile), folder.name, node, exposition, self._emit)
            if asked.port is not None and asked.host is not None:
                self._serve = functools.partial(
                    exposing.serve, asked.host, asked.port, exposition, folder, node, self._emit
                )
        except Exception as error:  # prometheus_client missing or broken: the job does not notice
            self._emit(events.ExportFailed("prometheus", f"cannot start: {type(error).__name__}: {error}"[:500]))
            return
        self._exposition = exposition

    def serve(self) -> None:
        """Serve the metrics from now on, if a port is asked for. Never raises."""
        if self._serve is not None:
            try:
                self._server = self._serve()
            except Exception as error:  # the job does not notice
                self._emit(events.ExportFailed("prometheus", f"cannot start: {type(error).__name__}: {error}"[:500]))

    def take(self, record: Record) -> bool:
        """Feed a record to the views. Never blocks; answers whether all of it was taken."""
        intervals = self.metrics.take(record)
        spans = [span for span in self._spans.spans(intervals) if span.end_ns >= self._since_ns]
        return self._sender is None or all([self._sender.offer(span) for span in spans])

    def fail(self, reason: str) -> None:
        """Put on record, once, that something here is broken."""
        if not self._has_failed:
            self._has_failed = True
            self._emit(events.ExportFailed("prometheus" if self._sender is None else "otlp", reason))

    def exposition(self) -> bytes | None:
        """Return the metrics as Prometheus text, None where nobody is to read them."""
        return None if self._exposition is None else self._exposition.text()

    def renew(self) -> None:
        """Let Prometheus know that this node is still there."""
        if self._server is not None:
            self._server.renew()

    def close(self, timeout: float, outcome: Outcome | None) -> None:
        """Let the exporters finish, at most `timeout` seconds in all. outcome: of the job on this node."""
        deadline = time.monotonic() + timeout
        if self._metric_sender is not None:
            self._metric_sender.close(max(0.0, (deadline - time.monotonic()) / 2))
        if self._sender is not None:
            self._sender.close(max(0.0, deadline - time.monotonic()))
        if self._server is not None:
            self._server.close(max(0.1, deadline - time.monotonic()), outcome)
