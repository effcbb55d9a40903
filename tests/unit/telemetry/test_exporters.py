"""What the exporters of a node do while its host or its disk fails."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.records import Record, to_line
from resilience.system.background import WRITER
from resilience.system.environment import Exporting
from resilience.telemetry import exporters, otlp_metrics
from resilience.telemetry.durations import Header, Recorder
from resilience.telemetry.exporters import Exports, ExportThread, MetricsOptions, NodeExports
from resilience.telemetry.final_state import FinalState
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.otlp import Emit
from resilience.telemetry.prometheus import ENDED, Exposition, MetricsServer
from resilience.telemetry.span import Span
from resilience.telemetry.spans import SpanView
from resilience.telemetry.targets import FOLDER, Targets
from tests.support.record_streams import Fault, job


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "RESILIENCE_RESTART_POLICY", "TRACEPARENT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("PORT", "HOST", "TEXTFILE", "RANKS"):
        monkeypatch.delenv(f"RESILIENCE_METRICS_{name}", raising=False)


@pytest.fixture
def emitted() -> list[events.Event]:
    """What the exporters put on record about themselves."""
    return []


def exporting(folder: Path, emitted: list[events.Event]) -> NodeExports:
    """Return exports of a run folder into the file for node-exporter."""
    exports = NodeExports.start(folder, "node", emitted.append, asked=MetricsOptions(textfile=str(folder.parent)))
    assert exports is not None
    return exports


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("kind", [ExportThread, NodeExports])
def test_host_without_a_thread_exports_nothing_and_says_so(
    kind: type[ExportThread] | type[NodeExports], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    emitted: list[events.Event] = []
    assert kind.start(tmp_path / "run", "node", emitted.append) is None
    assert emitted
    for event in emitted:
        assert isinstance(event, events.ExportFailed) and event.is_at_start
        assert event.reason == "cannot start: RuntimeError: can't start new thread"


def test_thread_that_cannot_go_on_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emitted: list[events.Event]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    exports = ExportThread.start(tmp_path / "run", "node", emitted.append, MetricsOptions(0))
    assert exports is not None
    exports.close(60.0)
    assert [type(event) for event in emitted] == [events.ExportFailed]
    emitted.clear()
    monkeypatch.setattr(NodeExports, "start", lambda *_: 1 / 0)
    exports = ExportThread.start(tmp_path / "run", "node", emitted.append, MetricsOptions(0))
    assert exports is not None
    exports.close(60.0)
    assert emitted == [events.ExportFailed("prometheus", "has ended: ZeroDivisionError: division by zero")]


def test_what_exporters_report_when_their_time_is_over_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def close(limit: float, own: FinalState | None) -> None:
        time.sleep(limit + 0.2)
        limits.append(limit)

    monkeypatch.setattr(exporters, "REPORT_LIMIT", 60.0)
    monkeypatch.setattr(NodeExports, "start", lambda *_: SimpleNamespace(poll=lambda: None, close=close))
    exports = ExportThread.start(tmp_path / "run", "node", lambda event: None, MetricsOptions(0))
    assert exports is not None
    exports.close(0.1)
    assert len(limits) == 1 and limits[0] <= 0.1


def test_counters_of_sections_do_not_fall_while_a_file_is_unreadable(
    tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = job(world=2).write(tmp_path / "run")
    for rank in range(2):
        recorder = Recorder(folder, Header(run="run", node="node", rank=rank, world_size=2), at=0.0)
        recorder.add("section.data", 1.0, 0.0)
        recorder.close(1.0)
    assert WRITER.flush(60.0)
    exports = exporting(folder, emitted)
    exports.poll()
    before = sections(exports)
    assert before == 2
    path = folder / "timings" / "node-1.hist"
    for unreadable in (b"{", None):
        path.unlink() if unreadable is None else path.write_bytes(unreadable)
        exports._take_durations()
        assert sections(exports) == before
    assert not [event for event in emitted if isinstance(event, events.ExportFailed)]


def sections(exports: NodeExports) -> float:
    """Return how many sections are counted."""
    samples = exports._exports.metrics.samples().items()
    return sum(value for (name, _), value in samples if name == "resilience_section_duration_seconds_bucket")


def test_folder_whose_name_is_not_utf8_is_exported_with_escapes(tmp_path: Path, emitted: list[events.Event]) -> None:
    folder = job(world=1).write(tmp_path / os.fsdecode(b"run-\xff"))
    exports = exporting(folder, emitted)
    exports.poll()
    assert not [event for event in emitted if isinstance(event, events.ExportFailed)]
    text = (tmp_path / "resilience-run-\\udcff-node.prom").read_text()
    (build,) = {line for line in text.splitlines() if line.startswith("resilience_run_info")}
    assert 'job_id="run-\\\\udcff"' in build and f'folder="{tmp_path}/run-\\\\udcff"' in build
    assert (folder / "metrics" / "node.prom").exists()


def test_entry_for_prometheus_is_renewed_though_the_snapshot_fails(
    tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    exports, renewed = exporting(job(world=1).write(tmp_path / "run"), emitted), list[bool]()
    monkeypatch.setattr(exports._exports, "exposition", lambda: 1 // 0)
    monkeypatch.setattr(exports._exports, "renew", lambda: renewed.append(True))
    exports.poll()
    assert renewed == [True]


def test_spans_are_sent_though_the_clock_is_set_back(
    tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans of records that existed before, and are old, have left already."""
    sent: list[Span] = []
    started = job(world=1)  # long ago
    exports = exporting(started.write(tmp_path / "run"), emitted)
    monkeypatch.setattr(exports._exports, "_sender", SimpleNamespace(offer=lambda span: [sent.append(span)]))
    (path,) = (tmp_path / "run" / "records").iterdir()
    records = path.read_bytes()
    path.write_bytes(records[: len(records) // 2])
    exports.poll()
    assert not sent
    path.write_bytes(records)
    exports.poll()
    assert sent


def test_span_whose_end_is_recorded_late_is_sent_after_a_takeover(
    tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record has a time that has not come yet, so it is young whenever the exports start."""
    told, late_s = job([Fault("exception", 0, 0)], world=1, started_ns=time.time_ns() - 7200 * 10**9), 3 * 3600
    number = next(n for n, record in enumerate(told.files[0]) if is_end_of_restart(record.event))
    record = told.files[0][number]
    late = msgspec.structs.replace(
        record,
        wall_ns=record.wall_ns + late_s * 10**9,
        mono_ns=record.mono_ns + late_s * 10**9,
        event=msgspec.structs.replace(record.event, ended_ago_s=float(late_s)),
    )
    told.files[0][number:] = [late]
    exports, sent = exporting(told.write(tmp_path / "run"), emitted), list[Span]()
    monkeypatch.setattr(exports._exports, "_sender", SimpleNamespace(offer=lambda span: [sent.append(span)]))
    exports.poll()
    assert [(span.name, span.end_ns) for span in sent] == [("restart", record.wall_ns)]


def is_end_of_restart(event: events.Event) -> bool:
    return isinstance(event, events.StageEnded) and event.stage == "restart"


def test_metrics_are_sent_once_all_earlier_records_are_counted(
    tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A successor that sent part of them would look like a reset of the counters."""
    counted: list[float] = []

    def send(exporting: Exporting, node: str, view: MetricView, emit: Emit) -> SimpleNamespace:
        samples = view.samples().items()
        counted.append(sum(value for (name, _), value in samples if name == "resilience_events_total"))
        return SimpleNamespace(close=lambda timeout: None)

    monkeypatch.setattr(otlp_metrics, "MetricSender", send)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    told = job(world=2)
    exports = NodeExports.start(told.write(tmp_path / "run"), "node", emitted.append)
    assert exports is not None and not counted
    for _ in range(2):
        exports.poll()
    assert counted == [len(told.records)]


@pytest.mark.parametrize("is_agents", [False, True])
def test_without_an_agent_a_stopped_node_keeps_the_entries_of_the_others(
    is_agents: bool, tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    assert Targets(tmp_path / "run", "other").announce("other:9400")
    server = MetricsServer("127.0.0.1", 0, Exposition(MetricView()), tmp_path / "run", "node", emitted.append)
    assert server.announce()
    exports = Exports(emitted.append, MetricView(), SpanView(), is_agents)
    monkeypatch.setattr(FinalState, "is_first", True)
    exports._server = server
    exports.close(1.0, "stopped")
    assert {path.name for path in (tmp_path / FOLDER).iterdir()} == (set() if is_agents else {"run@@other.json"})


def test_collector_that_takes_all_the_time_does_not_keep_the_end_of_the_job_from_prometheus(
    tmp_path: Path, emitted: list[events.Event]
) -> None:
    server = MetricsServer("127.0.0.1", 0, Exposition(MetricView()), tmp_path / "run", "node", emitted.append)
    assert server.announce()
    exports, left = Exports(emitted.append, MetricView(), SpanView(), is_agents=True), list[bool]()
    swallowing: Any = SimpleNamespace(close=lambda limit: left.append(not list((tmp_path / FOLDER).iterdir())))
    exports._server, exports._sender, exports._metric_sender = server, swallowing, swallowing
    exports.close(1.0, "completed")
    assert left == [True, True]


@pytest.mark.parametrize(("count", "outcome"), [("1", None), ("3", "failed")])
def test_job_that_torchrun_may_start_again_has_not_failed(
    count: str, outcome: str | None, tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank is killed, and torchrun ends the other one to start both again."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    told = job(world=2)
    for rank, signal in ((0, "SIGTERM"), (1, "SIGKILL")):
        begun = told.files[rank][:6]  # until its function is entered
        killed = msgspec.structs.replace(begun[0], sequence=1, event=events.RankExited(False, signal=signal))
        told.files[rank] = [*begun, killed]
    exports = exporting(told.write(tmp_path / "run"), emitted)
    left: list[str | None] = []
    monkeypatch.setattr(exports._exports, "close", lambda _, how: left.append(how))
    exports.close()
    assert left == [outcome]
    ended = [labels for name, labels in exports._exports.metrics.samples() if name == ENDED]
    assert ended == ([] if outcome is None else [(outcome,)])


@pytest.mark.parametrize(
    ("is_end_known", "limits"), [(False, [2.0, 1.5, 1.0, 1.0]), (True, [1.0, 0.75, 0.5, 0.5])], ids=["unknown", "known"]
)
def test_last_reads_have_all_the_time_that_is_left_if_only_records_show_the_end(
    is_end_known: bool,
    limits: list[float],
    tmp_path: Path,
    emitted: list[events.Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exporter that shows an end anyway needs half of it."""
    exports, now, asked = exporting(tmp_path / "run", emitted), [100.0], list[float]()
    exports._calls[tmp_path / "node-1.jsonl"] = (0, 0, 0)  # another monitor has not ended
    monkeypatch.setattr(exports, "poll", lambda limit=exporters.FOLDER_LIMIT: asked.append(limit))

    def sleep(seconds: float) -> None:
        now[0] += 0.5

    monkeypatch.setattr(exporters, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    exports.close(2.0, ended_agent() if is_end_known else FinalState())
    assert asked == limits


def ended_agent() -> FinalState:
    """Return the end of a job that its agent recorded."""
    own = FinalState()
    own.take(of_agent(5, events.JobEnded("completed", 0)))
    return own


def of_agent(sequence: int, event: events.Event) -> Record:
    return Record(sequence, 10**18 + sequence, 10**12 + sequence, Origin("run", "node", "agent", 7), event)


def test_late_records_do_not_take_back_the_end_that_the_agent_knows(
    tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run folder answers only at the last read, and lacks the end of the job."""
    path = tmp_path / "run" / "records" / "node-agent.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(to_line(of_agent(0, events.CyclePhaseStarted("rendezvous"))))
    asked = MetricsOptions(textfile=str(tmp_path))
    exports = NodeExports.start(tmp_path / "run", "node", emitted.append, is_agents=True, asked=asked)
    assert exports is not None
    exports.poll()
    poll, shown = exports.poll, list[str | None]()

    def poll_then_write(limit: float) -> None:
        poll(60.0)
        with path.open("ab") as file:
            file.write(to_line(of_agent(1, events.CycleStarted("first", 0, 3))))

    monkeypatch.setattr(exports, "poll", poll_then_write)
    monkeypatch.setattr(exports._exports, "close", lambda _, outcome: shown.append(outcome))
    exports.close(2.0, ended_agent())
    assert shown == ["completed"]
    text = (tmp_path / "resilience-run-node.prom").read_text()
    assert [line for line in text.splitlines() if line.startswith(ENDED) and 'outcome="completed"' in line]
