"""The launcher's agent exports for its node: metrics of all layers on one port, spans, and nobody else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

import resilience
from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.records import Record, to_line
from resilience.telemetry import exporters, rank_snapshot
from resilience.telemetry.exporters import ExportThread, MetricsOptions, NodeExports
from resilience.telemetry.metrics import MetricView
from tests.process.test_export import STRAIGHT, receiving, scrape
from tests.support.launch_streams import Fault, launched
from tests.support.ranks import free_port
from tests.support.server import ROOT

LIMIT = 30.0  # seconds that anything may take


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "RESILIENCE_METRICS_PORT", "RESILIENCE_RESTART_POLICY", "TRACEPARENT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def write(folder: Path, name: str, records: list) -> None:  # type: ignore[type-arg]
    (folder / "records").mkdir(parents=True, exist_ok=True)
    with (folder / "records" / name).open("ab") as file:
        file.write(b"".join(map(to_line, records)))


def test_agent_serves_what_its_node_tells_and_shows(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    told = launched([Fault("hang", 1)], nodes=2, is_running=True)
    for (node, rank), records in told.files.items():
        write(folder, f"{node}-{'agent' if rank is None else rank}.jsonl", records)
    origin = Origin("job", "node0", "monitor", 500, cycle=1, initial_rank=0, world_size=4, layer="launcher")
    now = time.monotonic()
    opened = (rank_snapshot.SnapshotSection("data", now - 100.0),)
    assert rank_snapshot.write(
        folder, rank_snapshot.RankSnapshot(origin, "run", now, time.time() - now, 33, now, now, opened)
    )
    emitted: list[events.Event] = []
    exports = ExportThread.start(folder, "node0", emitted.append, MetricsOptions(free_port()), is_agents=True)
    assert exports is not None
    sd_file = tmp_path / ".targets" / "run@@node0.json"
    until(sd_file.exists)
    (entry,) = json.loads(sd_file.read_text())
    port = int(entry["targets"][0].split(":")[1])
    assert entry["labels"] == {"job_id": "run", "node": "node0", "__param_job_id": "run"}
    until(lambda: 'resilience_restart_iteration{layer="launcher"} 1.0' in scrape(port))
    text = scrape(port)
    for line in (
        'resilience_rank_state{rank="0",state="active"} 1.0',
        'resilience_rank_step{rank="0"} 33.0',
        'resilience_restart_budget_remaining{layer="launcher"} 9.0',
        'resilience_restart_iterations_total{layer="launcher",outcome="interrupted"} 1.0',
    ):
        assert line in text
    (open_s,) = [float(row.split()[-1]) for row in text.splitlines() if row.startswith("resilience_rank_section_open")]
    assert 100.0 <= open_s < 100.0 + LIMIT
    agent = told.files["node0", None][-1].origin
    write(folder, "node0-agent.jsonl", [Record(99, 10**18, 10**18, agent, events.JobEnded("completed", 0))])
    exports.close(LIMIT)
    assert not sd_file.exists()  # nothing is there any more to be scraped
    with pytest.raises(OSError):
        STRAIGHT.open(f"http://127.0.0.1:{port}/metrics", timeout=5)
    view = MetricView()
    for record in told.of_node("node0"):
        view.take(record)
    snapshot = (folder / "metrics" / "node0.prom").read_text()
    for (name, labels), value in view.samples().items():
        if name == "resilience_events_total":
            assert f'{name}{{event="{labels[0]}"}} {value:.1f}' in snapshot


def test_each_scrape_shows_the_silence_of_a_rank_as_its_newest_file_has_it(tmp_path: Path) -> None:
    """The age of the file is not added: a rank that steps every 70 ms was not silent since its file was written."""
    folder = tmp_path / "run"
    for (node, rank), records in launched(is_running=True).files.items():
        write(folder, f"{node}-{'agent' if rank is None else rank}.jsonl", records)
    # With 10,000 ranks a file is written every 78 s, so it is not overdue when the scrape of a busy machine reads it.
    origin = Origin("job", "node0", "monitor", 500, initial_rank=0, world_size=10_000, layer="launcher")

    def show(silent_s: float) -> None:
        written_at = time.monotonic() - 5.0
        offset = time.time() - time.monotonic()
        shown = rank_snapshot.RankSnapshot(origin, "run", written_at, offset, heartbeat_at=written_at - silent_s)
        assert rank_snapshot.write(folder, shown)

    port = free_port()
    exports = ExportThread.start(folder, "node0", lambda event: None, MetricsOptions(port), is_agents=True)
    assert exports is not None
    until((tmp_path / ".targets" / "run@@node0.json").exists)
    try:
        for silent_s in (13.0, 0.07, 13.0, 0.07):  # faster than the agent reads histograms and writes its own files
            show(silent_s)
            assert f'resilience_rank_silence_seconds{{rank="0"}} {silent_s}' in scrape(port).splitlines()
    finally:
        exports.close(LIMIT)


def test_scrape_shows_no_step_and_silence_of_a_rank_whose_monitor_writes_no_more(tmp_path: Path) -> None:
    """Else a dashboard shows a healthy speed for a rank that nobody hears."""
    folder, port = tmp_path / "run", free_port()
    started_run(folder)
    # In a job of 6,400 ranks a file is old after 300 s: no load of the machine makes that of rank 1 old.
    for rank, age_s, world_size in ((0, 60.0, 2), (1, 0.0, 6400)):
        origin = Origin("job", "node0", "monitor", 500, initial_rank=rank, world_size=world_size, layer="launcher")
        at = time.monotonic() - age_s
        shown = rank_snapshot.RankSnapshot(origin, "run", at, step=7 + rank, step_at=at, heartbeat_at=at)
        assert rank_snapshot.write(folder, shown)
    exports = ExportThread.start(folder, "node0", lambda event: None, MetricsOptions(port), is_agents=True)
    assert exports is not None
    try:
        until((tmp_path / ".targets" / "run@@node0.json").exists)
        lines = [line for line in scrape(port).splitlines() if not line.startswith("#")]
    finally:
        exports.close(LIMIT)
    steps = [line for line in lines if line.startswith(("resilience_step", "resilience_rank_step"))]
    assert steps == [
        "resilience_step 8.0",
        "resilience_step_lowest 8.0",
        "resilience_step_median 8.0",
        'resilience_rank_step{rank="1"} 8.0',
    ]
    assert [line for line in lines if "silence" in line] == ['resilience_rank_silence_seconds{rank="1"} 0.0']


def without_answer(path: Path) -> Path:
    """Put a file there whose readers wait, as for a file server that does not answer, until `answer` is called."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def answer(path: Path) -> None:
    """Let the readers of the file find nothing from now on."""
    writer = os.open(path, os.O_RDWR)
    path.unlink()
    os.close(writer)


def started_run(folder: Path) -> None:
    for (node, rank), records in launched(is_running=True).files.items():
        write(folder, f"{node}-{'agent' if rank is None else rank}.jsonl", records)


def test_scrape_is_answered_without_values_of_ranks_while_their_files_do_not_answer(tmp_path: Path) -> None:
    """Else Prometheus would report a healthy job as gone."""
    folder, port = tmp_path / "run", free_port()
    started_run(folder)
    silent = without_answer(rank_snapshot.path_of(folder, "node0", 0))
    exports = ExportThread.start(folder, "node0", lambda event: None, MetricsOptions(port), is_agents=True)
    assert exports is not None
    try:
        until((tmp_path / ".targets" / "run@@node0.json").exists)
        lines = scrape(port).splitlines()
        assert "resilience_run_folder_up 0.0" in lines
        assert 'resilience_rank_state{rank="0",state="active"} 1.0' in lines  # from the records
    finally:
        answer(silent)
    origin = Origin("job", "node0", "monitor", 500, initial_rank=0, world_size=2, layer="launcher")
    assert rank_snapshot.write(folder, rank_snapshot.RankSnapshot(origin, "run", time.monotonic(), step=7))
    until(lambda: {"resilience_run_folder_up 1.0", 'resilience_rank_step{rank="0"} 7.0'} <= {*scrape(port).split("\n")})
    exports.close(LIMIT)


@pytest.mark.parametrize("name", ["node0-0.hist", "node0-0.signs"])
def test_file_for_node_exporter_goes_on_while_the_run_folder_does_not_answer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporters, "SNAPSHOT_EVERY", 0.1)
    folder, path = tmp_path / "run", tmp_path / "resilience-run-node0.prom"
    started_run(folder)
    asked = MetricsOptions(textfile=str(tmp_path))
    exports = ExportThread.start(folder, "node0", lambda event: None, asked, is_agents=True)
    assert exports is not None
    is_up = 'resilience_run_folder_up{job_id="run",node="node0"} '
    until(lambda: path.exists() and f"{is_up}1.0" in path.read_text())
    silent = without_answer(folder / "timings" / name)
    try:
        until(lambda: f"{is_up}0.0" in path.read_text())
        before = path.stat().st_mtime_ns
        until(lambda: path.stat().st_mtime_ns != before)
    finally:
        answer(silent)
    until(lambda: f"{is_up}1.0" in path.read_text())
    exports.close(LIMIT)


def test_run_folder_that_cannot_be_written_is_not_up(tmp_path: Path) -> None:
    """Its disk may be full, and take no record that says so."""
    folder, port = tmp_path / "run", free_port()
    started_run(folder)
    (folder / "metrics").write_text("no folder")
    exports = ExportThread.start(folder, "node0", lambda event: None, MetricsOptions(port), is_agents=True)
    assert exports is not None
    until((tmp_path / ".targets" / "run@@node0.json").exists)
    until(lambda: "resilience_run_folder_up 0.0" in scrape(port).splitlines())
    exports.close(LIMIT)


def test_job_of_the_launcher_exports_its_versions(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # The last scrape has little time when the job ends.
    script.write_text(f"""
import pathlib, time, resilience
resilience.step(0)
until = time.monotonic() + 120
while time.monotonic() < until:
    if any("resilience_build_info{{" in path.read_text() for path in pathlib.Path({str(tmp_path)!r}).rglob("*.prom")):
        break
    time.sleep(0.05)
""")
    done = subprocess.run(
        [sys.executable, "-m", "resilience.cli", "run", "--nproc-per-node", "1", str(script)],
        env={
            **os.environ,
            "RESILIENCE_RUN_DIR": str(tmp_path / "runs"),
            "RESILIENCE_JOB_ID": "job",
            "RESILIENCE_METRICS_PORT": str(free_port()),
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (numbers,) = (tmp_path / "runs" / "job" / "metrics").glob("*.prom")  # those of the last scrape
    versions = f'torch="{version("torch")}",version="{resilience.__version__}"'
    assert f"resilience_build_info{{{versions}}} 1.0" in numbers.read_text().splitlines()


def test_last_records_are_sent_before_the_agent_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        exports = ExportThread.start(tmp_path, "node0", lambda event: None, is_agents=True)
        assert exports is not None
        late = time.time_ns()
        first, *_ = records = launched().files["node0", None]
        moved = [type(r)(r.sequence, r.wall_ns - first.wall_ns + late, r.mono_ns, r.origin, r.event) for r in records]
        write(tmp_path, "node0-agent.jsonl", moved)
        exports.close(LIMIT)
        names = {span.name for span in receiver.spans.values()}
    assert {"resilience.job", "launcher.cycle", "gate", "rendezvous", "spawn", "run", "stop"} <= names


def test_nothing_is_started_where_nothing_is_asked_for(tmp_path: Path) -> None:
    assert ExportThread.start(tmp_path, "node0", lambda event: None, is_agents=True) is None


def test_monitor_under_the_launcher_leaves_it_to_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENCE_METRICS_PORT", str(free_port()))
    monkeypatch.setenv("RESILIENCE_RESTART_POLICY", "any-failed")
    assert NodeExports.start(tmp_path, "node0", lambda event: None) is None


def test_wrong_port_is_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENCE_METRICS_PORT", "many")
    emitted: list[events.Event] = []
    exports = ExportThread.start(tmp_path, "node0", emitted.append, is_agents=True)
    assert exports is not None
    exports.close(LIMIT)
    assert [type(event) for event in emitted] == [events.ExportFailed]
