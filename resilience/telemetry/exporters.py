"""How do metrics and spans leave a node?  Through exporters in one of its monitors, or in its agent.

Under the launcher, the agent exports for its node, for all cycles, and monitors never do. Without the launcher, the
leading monitor of the node does. `NodeExports` reads the growing record files of its node and feeds them to the views:
a successor of a dead exporter reads the files from the start and gets the same counters. Spans leave over OTLP if the
OTEL_* variables name an endpoint. Metrics are served if RESILIENCE_METRICS_PORT is set, and written for node-exporter
if RESILIENCE_METRICS_TEXTFILE is set (`telemetry.prometheus`). Without any of them, `start` returns None and nothing is
imported.

Fail-open: nothing here raises, blocks or decides. A collector that is dead, slow or returns garbage costs spans, which
are counted (`TelemetryDropped`); a full or read-only disk costs the snapshots. `close` is bounded. A run folder that
does not answer costs what is in it: the endpoint and the file for node-exporter go on without it, because without them
a healthy job would look dead. `resilience_run_folder_up` says so.

After a takeover, spans that ended more than MARGIN seconds before it, by a record as old, are assumed to have left
already. The last ones may leave twice; their ids are equal, so a back end that knows ids keeps one."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from resilience.errors import ConfigurationError, DecodeError, error_in_words
from resilience.facts import encoding, events
from resilience.facts.identity import owner_of
from resilience.facts.records import Record
from resilience.history.timeline import Timeline
from resilience.system import files
from resilience.system.background import LAST_STALL, STALL, WRITER, Writer
from resilience.system.environment import Exporting, Settings, has_agent, torchrun_restarts_left
from resilience.telemetry import durations, rank_snapshot
from resilience.telemetry.final_state import FinalState, Outcome
from resilience.telemetry.metrics import About, FolderLook, MetricView
from resilience.telemetry.otlp import Emit, SpanSender
from resilience.telemetry.recording import RecordTail
from resilience.telemetry.span import parse_traceparent
from resilience.telemetry.spans import SpanView

if TYPE_CHECKING:
    from resilience.telemetry.otlp_metrics import MetricSender
    from resilience.telemetry.prometheus import Exposition, MetricsServer, TextFile

MARGIN = 15.0  # an exporter sends spans whose end, or its record, is younger than this many seconds at its start
SNAPSHOT_EVERY = 15.0  # seconds between reads of the timing histograms, and between snapshots and node-exporter files
LIST_AT_MOST_EVERY = 60.0  # seconds; new files of a node appear when it starts, rarely later
POLL_EVERY = 0.5  # seconds between reads of the record files
CATCH_UP_LOOKS = 1000  # reads before the metrics are served; each takes up to 4 MiB of each file
LINGER = 0.02  # seconds between reads of the files of ranks that are about to end
FOLDER_LIMIT = LAST_STALL  # seconds for all reads and writes of a poll: milliseconds, as a rule
SCRAPE_LIMIT = STALL  # seconds for the ranks' snapshots at a scrape, which Prometheus gives up after 10 s
REPORT_LIMIT = 1.0  # seconds in which the thread reports what could not be sent in the time that it had

Call = tuple[int, int, int]  # attempt, cycle, call
T = TypeVar("T")


class NodeExports:
    """The exports of one node: its record files, fed to the views."""

    def __init__(self, folder: Path, node: str, exports: Exports) -> None:
        self._folder = folder
        self._node = node
        self._exports = exports
        self._pattern = re.compile(rf"{re.escape(node)}-(\d+|agent)\.jsonl")
        self._read: dict[Path, RecordTail] = {}
        self._calls: dict[Path, Call] = {}  # ranks whose monitor has not ended, with their current call
        self._own: Path | None = None  # of the monitor that exports
        self._durations: dict[int, durations.Durations] = {}  # by initial rank, as last read
        self._list_at = 0.0
        self._list_pause = 1.0
        self._snapshot_at = 0.0
        self._is_agents = exports.is_agents
        self._is_last = False
        self._own_end: FinalState | None = None  # of the agent, once it has one
        self._has_caught_up = False
        self._poll_thread, self._scrape_thread = Writer(), Writer()  # the run folder may block them
        self._answers = self._takes_files = True  # the run folder, at the last poll
        exports.metrics.look = self._look

    @classmethod
    def start(
        cls, folder: Path, node: str, emit: Emit, is_agents: bool = False, asked: MetricsOptions | None = None
    ) -> NodeExports | None:
        """Start the exporters that the environment requests; return None if it requests none, or if another process
        exports for this node.

        folder: the run folder. emit: takes events about the exporting itself. is_agents: called by the launcher's
        agent. asked: the command line's metrics options. Never raises."""
        if not is_agents and has_agent():
            return None  # this node's agent exports
        exports = Exports.from_environment(folder, node, emit, is_agents, asked or MetricsOptions())
        return None if exports is None else cls(folder, node, exports)

    def poll(self, limit: float = FOLDER_LIMIT) -> None:
        """Read what was added to the node's files since the last call, and write the metrics at intervals. Costs one
        `stat` per file. If the run folder does not answer, go on without it after `limit` seconds. Never raises."""
        is_due = time.monotonic() >= self._snapshot_at
        if not self._has_caught_up:  # nothing is shown before, so there is nothing to go on with
            limit = threading.TIMEOUT_MAX
        try:
            self._poll_thread.ask(lambda: self._guarded(lambda: self._in_folder(is_due)), limit)
            self._answers = True
        except OSError:
            self._answers = False
        if is_due and self._has_caught_up:
            self._snapshot_at = time.monotonic() + SNAPSHOT_EVERY
            self._guarded(self._write_textfile)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # edge to the caller: a failure of the views must not reach it
            self._exports.fail(f"cannot process the records: {error_in_words(error)}")

    def _in_folder(self, is_due: bool) -> None:
        """Do a poll's reads and writes in the run folder. is_due: the metrics are to be written too."""
        now = time.monotonic()
        if now >= self._list_at:
            self._list(now)
        self._take_added()
        self._show_own_end()
        if not self._has_caught_up:
            # Before we have caught up, the counters are smaller than those that an earlier exporter showed.
            for _ in range(CATCH_UP_LOOKS):
                if not self._take_added():
                    break
            self._take_durations()
            self._exports.caught_up()
            self._has_caught_up = True
        if is_due:
            self._exports.renew()
            self._take_durations()
            self._write_snapshot()

    def _take_added(self) -> bool:
        """Feed new records to the views; return True if there were any."""
        batch: list[tuple[int, Record]] = []
        for path, tail in self._read.items():
            order_ns = 0
            for record in tail.added():
                self._note(path, record)
                order_ns = max(order_ns, record.mono_ns)
                batch.append((order_ns, record))
        # One clock orders the records of different files of a node. Within a file, keep the file's order, because
        # several processes write into it and a replay must give the same result.
        batch.sort(key=lambda entry: entry[0])
        for _, record in batch:
            self._exports.take(record)
        return bool(batch)

    def _look(self) -> FolderLook:
        """Return what a scrape shows of the run folder. Called in its thread, which waits for SCRAPE_LIMIT at most."""
        try:
            snapshots = self._scrape_thread.ask(self._rank_snapshots, SCRAPE_LIMIT)
        except OSError:
            return FolderLook({}, False)
        return FolderLook(snapshots, self._answers and self._takes_files)

    def _rank_snapshots(self) -> dict[int, rank_snapshot.RankSnapshot]:
        """Return the current snapshots of the node's ranks."""
        snapshots: dict[int, rank_snapshot.RankSnapshot] = {}
        for path in list(self._read):
            rank = owner_of(path.stem).rank
            if rank is not None:
                try:
                    snapshots[rank] = rank_snapshot.read(rank_snapshot.path_of(self._folder, self._node, rank))
                except (OSError, DecodeError):
                    continue  # the rank has no snapshot yet
        return snapshots

    def close(self, timeout: float = 2.0, own: FinalState | None = None) -> None:
        """Read the last records and let the exporters finish, for at most `timeout` seconds. own: the end of the job on
        this node as its agent knows it: the run folder may not show it, because it does not answer or is full.

        Wait at most half of that time for the other monitors, which write the last timings of their ranks before they
        end: the other ranks of an ended rank end at about the same time, and a rank may have died while all were
        ending. The next leader exports for ranks that continue."""
        deadline = time.monotonic() + timeout
        is_end_known = own is not None and own.outcome is not None

        def read_limit() -> float:
            left = deadline - time.monotonic()  # half of it if the exporters have an end to show anyway
            return max(LINGER, left / 2 if is_end_known else min(FOLDER_LIMIT, left))

        WRITER.flush(timeout / 2)  # the last records of this process
        self._list_at = 0.0
        self.poll(read_limit())
        while self._answers and self._calls.keys() - {self._own} and time.monotonic() < deadline - timeout / 2:
            time.sleep(LINGER)
            self.poll(read_limit())
        self._own_end = own if is_end_known else None
        self._show_own_end()
        self._snapshot_at, self._is_last = 0.0, True
        self.poll(read_limit())
        self._show_own_end()
        # A monitor may close while ranks of the node continue; the next one takes over. An agent that has not recorded
        # how the job ended counts like a killed one, and so do failed ranks that torchrun may start again.
        final = self._exports.metrics.final
        outcome = final.outcome or (None if self._is_agents or final.has_failed else "left")
        self._exports.close(max(0.0, deadline - time.monotonic()), outcome)
        self._poll_thread.leave()
        self._scrape_thread.leave()

    def _show_own_end(self) -> None:
        """Let the metrics show the end that the agent knows, unless the records show one. Late records of the time
        before, as of the last cycle's start, may have taken it back."""
        metrics = self._exports.metrics
        if self._own_end is not None and metrics.final.outcome is None:
            metrics.final = copy.copy(self._own_end)  # it takes further records

    def _note(self, path: Path, record: Record) -> None:
        """Track which monitors watch a call."""
        call = (record.origin.attempt, record.origin.cycle, record.origin.call)
        match record.event:
            case events.CallStarted():
                self._calls[path] = call
            case events.MonitorStarted() if record.origin.pid == os.getpid():
                self._own = path
            case events.MonitorEnded() if self._calls.get(path) == call and not record.origin.is_launchers:
                del self._calls[path]
            case events.WorkerStarted():
                self._list_at, self._list_pause = 0.0, 1.0  # its monitor is about to create a file
            case _:  # no other event matters here
                pass

    def _list(self, now: float) -> None:
        """List the node's files, less and less often: a folder may hold the files of 10,000 ranks."""
        self._list_pause = min(self._list_pause * 2, LIST_AT_MOST_EVERY)
        self._list_at = now + self._list_pause
        try:
            names = [path for path in (self._folder / "records").iterdir() if self._pattern.fullmatch(path.name)]
        except OSError:
            return
        for path in sorted(names):
            self._read.setdefault(path, RecordTail(path))

    def _take_durations(self) -> None:
        for path in self._read:
            # If it is not written yet, there is nothing to add. If it is unreadable now, counters must not fall.
            with contextlib.suppress(OSError, DecodeError):
                recorded = durations.read_histograms(self._folder / "timings" / f"{path.stem}.hist")
                self._durations[recorded.header.rank] = recorded
        self._exports.metrics.take_durations(dict(self._durations))

    def _write_snapshot(self) -> None:
        exposition = self._exports.exposition()
        if exposition is not None:
            self._takes_files = files.replace(self._folder / "metrics" / f"{self._node}.prom", exposition)

    def _write_textfile(self) -> None:
        if self._exports.textfile is not None:
            self._exports.textfile.write(self._is_last)


class MetricsOptions(msgspec.Struct, frozen=True):
    """The command line's metrics options, which replace the settings METRICS_PORT, _HOST and _TEXTFILE."""

    port: int | None = None
    host: str | None = None
    textfile: str | None = None

    def beside(self, settings: Settings) -> MetricsOptions:
        """Return the effective options: these, completed by the settings."""
        return MetricsOptions(
            settings.metrics_port if self.port is None else self.port,
            self.host or settings.metrics_host,
            self.textfile or settings.metrics_textfile,
        )

    @property
    def is_nothing(self) -> bool:
        return self.port is None and self.textfile is None


class ExportThread:
    """The exporters of a node, which run in their own thread until `close`: a disk may block it as long as it likes."""

    def __init__(self, folder: Path, node: str, emit: Emit, is_agents: bool, asked: MetricsOptions) -> None:
        self._place = (folder, node, emit, is_agents, asked)
        self._done = threading.Event()
        self._close_by = 0.0
        self._own = FinalState() if is_agents else None  # the agent's end of the job
        self._thread = threading.Thread(target=self._run, name="resilience-exports", daemon=True)

    @classmethod
    def start(
        cls, folder: Path, node: str, emit: Emit, asked: MetricsOptions | None = None, is_agents: bool = False
    ) -> ExportThread | None:
        """Export for this node from now on; return None, without a thread, if no export is requested, or if another
        process exports for this node. Never raises.

        Call this after the process's last fork. folder: the run folder. emit: takes events about the exporting
        itself, from any thread. asked: the command line's metrics options. is_agents: called by the launcher's
        agent."""
        if not is_agents and has_agent():
            return None  # this node's agent exports
        asked = asked or MetricsOptions()
        exporting = Exporting.from_environment()
        if exporting.protocol is None and exporting.metrics_protocol is None:
            try:
                if asked.beside(Settings.from_environment()).is_nothing:
                    return None
            except ConfigurationError:
                pass  # the thread reports it
        exports = cls(folder, node, emit, is_agents, asked)
        try:
            exports._thread.start()
        except RuntimeError as error:  # this host or process has no thread left: the job does not notice
            reason = f"cannot start: {error_in_words(error)}"
            emit(events.ExportFailed("prometheus" if exporting.protocol is None else "otlp", reason, is_at_start=True))
            return None
        return exports

    def take(self, record: Record) -> bool:
        """Note what the agent itself records, as a sink of its events; the record of its end may reach no file."""
        if self._own is not None and self._own.outcome is None:
            self._own.take(record)
        return True

    def close(self, timeout: float = 2.0) -> None:
        """Read the last records and let the exporters finish, within about `timeout` seconds."""
        self._close_by = time.monotonic() + timeout
        self._done.set()
        self._thread.join(timeout + REPORT_LIMIT)

    def _run(self) -> None:
        emit = self._place[2]
        try:
            self._export()
        except Exception as error:  # the thread's edge: it must not end without a word
            emit(events.ExportFailed("prometheus", f"has ended: {error_in_words(error)}"))

    def _export(self) -> None:
        folder, node, emit, is_agents, asked = self._place
        exports = NodeExports.start(folder, node, emit, is_agents, asked)
        if exports is None:
            return
        while not self._done.wait(POLL_EVERY):
            exports.poll()
        exports.close(max(0.0, self._close_by - time.monotonic()), self._own)


class Exports:
    """The exporters: a sender of spans, a server and a file for metrics, and the views that feed them."""

    def __init__(self, emit: Emit, metrics: MetricView, spans: SpanView, is_agents: bool = False) -> None:
        self.is_agents = is_agents
        self.metrics = metrics
        self.textfile: TextFile | None = None
        self._emit = emit
        self._spans = spans
        self._sender: SpanSender | None = None
        self._send_metrics: Callable[[], MetricSender] | None = None  # starts the requested sender
        self._metric_sender: MetricSender | None = None
        self._exposition: Exposition | None = None
        self._server: MetricsServer | None = None
        self._serve: Callable[[], MetricsServer | None] | None = None  # starts the requested server
        # Spans that ended before this, by a record from before this, have left. 0 once this exporter has caught up.
        self._since_ns = time.time_ns() - round(MARGIN * 1e9)
        self._has_failed = False

    @classmethod
    def from_environment(
        cls, folder: Path, node: str, emit: Emit, is_launched: bool, asked: MetricsOptions
    ) -> Exports | None:
        """Start the exporters that the environment requests; return None if it requests none. Never raises.

        is_launched: the node's ranks belong to the launcher. asked: as for `NodeExports.start`."""
        exporting = Exporting.from_environment()
        settings, restarts_left = Settings(), None
        try:
            settings = Settings.from_environment()
            restarts_left = torchrun_restarts_left()
        except ConfigurationError as error:
            emit(events.ExportFailed("prometheus", f"cannot start: {error}", is_at_start=True))
        asked = asked.beside(settings)
        from resilience import __version__

        about = About(
            encoding.text(str(folder)), __version__, str(getattr(sys.modules.get("torch"), "__version__", ""))
        )
        parent = parse_traceparent(exporting.traceparent)
        timeline = Timeline(is_launched=is_launched)
        view = MetricView(time.monotonic_ns, settings.metrics_ranks, about, timeline, parent)
        view.final = FinalState(may_begin_again=not is_launched and (restarts_left or 0) > 0)
        exports = cls(emit, view, SpanView(parent), is_launched)
        if exporting.protocol is not None:
            exports._sender = exports._started("otlp", lambda: SpanSender(exporting, node, emit))
        if exporting.metrics_protocol is not None:
            from resilience.telemetry.otlp_metrics import MetricSender  # loaded only by a node that sends metrics

            exports._send_metrics = functools.partial(MetricSender, exporting, node, view, emit)
        if not asked.is_nothing:
            exports._expose(folder, node, asked)
        is_nothing = exports._sender is None and exports._send_metrics is None and exports._exposition is None
        return None if is_nothing else exports

    def _expose(self, folder: Path, node: str, asked: MetricsOptions) -> None:
        """Set up the requested text file and server for metrics."""
        try:
            from resilience.telemetry import prometheus  # a node without exports loads no server

            exposition = prometheus.Exposition(self.metrics)
            if asked.textfile is not None:
                try:
                    self.textfile = prometheus.TextFile(Path(asked.textfile), folder.name, node, exposition, self._emit)
                except NotADirectoryError as error:  # the server may start nevertheless
                    self._emit(events.ExportFailed("prometheus", f"cannot start: {error}", is_at_start=True))
            if asked.port is not None and asked.host is not None:
                self._serve = functools.partial(
                    prometheus.serve, asked.host, asked.port, exposition, folder, node, self._emit
                )
        except Exception as error:  # prometheus_client missing or broken: the job does not notice
            self._report_failed_start("prometheus", error)
            return
        self._exposition = exposition

    def _started(
        self, exporter: Literal["prometheus", "otlp"], start: Callable[[], T], signal: Literal["", "metric"] = ""
    ) -> T | None:
        """Return an exporter; report it and return None if it cannot start."""
        try:
            return start()
        except Exception as error:  # no thread is left, or the exporter is broken: the job does not notice
            self._report_failed_start(exporter, error, signal)
            return None

    def _report_failed_start(
        self, exporter: Literal["prometheus", "otlp"], error: Exception, signal: Literal["", "metric"] = ""
    ) -> None:
        reason = f"cannot start: {error_in_words(error)}"
        self._emit(events.ExportFailed(exporter, reason, is_at_start=True, signal=signal))

    def caught_up(self) -> None:
        """Note that all earlier records are taken: send all spans and the metrics, and serve these if a port is set.
        Never raises."""
        self._since_ns = 0  # the wall clock may be set back
        if self._send_metrics is not None:
            self._metric_sender = self._started("otlp", self._send_metrics, "metric")
        if self._serve is not None:
            self._server = self._started("prometheus", self._serve)

    def take(self, record: Record) -> bool:
        """Feed a record to the views. Never blocks; return True if everything was taken."""
        intervals = self.metrics.take(record)
        spans = self._spans.spans(intervals)
        spans = [span for span in spans if max(record.wall_ns, span.end_ns) >= self._since_ns]
        return self._sender is None or all([self._sender.offer(span) for span in spans])

    def fail(self, reason: str) -> None:
        """Report a failure of the exporters, once."""
        if not self._has_failed:
            self._has_failed = True
            self._emit(events.ExportFailed("prometheus" if self._sender is None else "otlp", reason))

    def exposition(self) -> bytes | None:
        """Return the metrics as Prometheus text, None if no reader is set up."""
        return None if self._exposition is None else self._exposition.text()

    def renew(self) -> None:
        """Renew this node's entry for Prometheus."""
        if self._server is not None:
            self._server.renew(self.metrics.final.is_first)

    def close(self, timeout: float, outcome: Outcome | None) -> None:
        """Let the exporters finish, within `timeout` seconds in total. outcome: of the job on this node."""
        deadline = time.monotonic() + timeout
        if outcome == "stopped" and not self.is_agents:
            outcome = "left"  # without an agent, this node knows only that its own ranks were asked to stop
        if self._server is not None:  # first: a collector may take all the time, and then the job would look killed
            self._server.leave(outcome, self.metrics.final.is_first)
        if self._metric_sender is not None:
            self._metric_sender.close(max(0.0, (deadline - time.monotonic()) / 2))
        if self._sender is not None:
            self._sender.close(max(0.0, deadline - time.monotonic()))
        if self._server is not None:
            self._server.close(max(0.1, deadline - time.monotonic()))
