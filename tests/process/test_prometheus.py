"""A node's metrics can be read over HTTP, found by Prometheus, and collected by node-exporter from a file."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from resilience.facts import events
from resilience.system import descriptors
from resilience.telemetry import prometheus
from resilience.telemetry.exporters import MetricsOptions, NodeExports
from tests.process.launching import Launched, launcher
from tests.process.test_export import STRAIGHT, scrape
from tests.support import threads
from tests.support.account import Account
from tests.support.busy_node import busy_node
from tests.support.prometheus import MISSING, Prometheus
from tests.support.ranks import Job, free_port
from tests.support.record_streams import Fault, job

LIMIT = 60.0  # seconds that anything may take
CONNECTIONS, THREADS = 16, 20  # of the endpoint, at most, as docs/account.md says
SECONDS = 10.0  # for each connection
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not here: apt-get install prometheus"
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "TRACEPARENT", "RESILIENCE_RESTART_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("PORT", "HOST", "TEXTFILE", "RANKS"):
        monkeypatch.delenv(f"RESILIENCE_METRICS_{name}", raising=False)


@pytest.fixture
def emitted() -> list[events.Event]:
    """What the exporters put on record about themselves."""
    return []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder of a node that has been restarted."""
    return job([Fault("exception", 1, 0)], started_ns=time.time_ns() - 12 * 10**9).write(tmp_path / "run")


@contextmanager
def exporting(
    folder: Path, emitted: list[events.Event], asked: MetricsOptions | None = None, node: str = "node"
) -> Iterator[NodeExports]:
    exports = NodeExports.start(folder, node, emitted.append, asked=asked)
    assert exports is not None, emitted
    exports.poll()
    try:
        yield exports
    finally:
        exports.close()


def served_at(emitted: list[events.Event]) -> list[int]:
    """The ports, in the order in which servers began."""
    begun = [e.endpoint for e in emitted if isinstance(e, events.ExportStarted) and e.endpoint.startswith("http:")]
    return [int(endpoint.removesuffix("/metrics").rpartition(":")[2]) for endpoint in begun]


def series(text: str) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# -- node-exporter's file ----------------------------------------------------------------------


def test_file_for_node_exporter_has_the_series_of_the_endpoint_and_says_whose_they_are(
    folder: Path, tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    collected = tmp_path / "textfile"
    collected.mkdir()
    monkeypatch.setenv("RESILIENCE_METRICS_PORT", "0")
    monkeypatch.setenv("RESILIENCE_METRICS_TEXTFILE", str(collected))
    own = (("job_id", "run"), ("node", "node"))
    with exporting(folder, emitted):
        (path,) = collected.iterdir()
        assert path.name == "resilience-run-node.prom"
        text = path.read_text()
        served = series(scrape(*served_at(emitted)))
    written = (prometheus.WRITTEN, own)
    assert series(text) == {(name, tuple(sorted((*labels, *own)))) for name, labels in served} | {written}
    assert " # {" not in text  # exemplars are none of this format
    last = path.read_text()
    counted = (
        'resilience_restart_iterations_total{job_id="run",layer="inprocess",node="node",outcome="interrupted"} 1.0'
    )
    assert counted in text and counted in last
    gauges = {line.split()[2] for line in last.splitlines() if line.endswith(" gauge")}
    assert " gauge\n" in text and gauges == {
        prometheus.WRITTEN,
        prometheus.ENDED,
    }  # others are of ranks that have ended
    assert list(collected.iterdir()) == [path]


@needs_promtool
@pytest.mark.parametrize("is_last", [False, True])
def test_promtool_finds_nothing_wrong_with_the_file(is_last: bool, tmp_path: Path) -> None:
    exposition = prometheus.Exposition(busy_node())
    prometheus.TextFile(tmp_path, "job", "node", exposition, lambda event: None).write(is_last)
    (path,) = tmp_path.iterdir()
    done = subprocess.run(["promtool", "check", "metrics"], input=path.read_bytes(), capture_output=True, check=False)
    assert (done.returncode, done.stdout.decode(), done.stderr.decode()) == (0, "", "")


def test_file_without_a_server_is_enough(folder: Path, tmp_path: Path, emitted: list[events.Event]) -> None:
    with exporting(folder, emitted, MetricsOptions(textfile=str(tmp_path))):
        assert served_at(emitted) == []
        assert (folder / "metrics" / "node.prom").exists()
    assert [type(event) for event in emitted] == [events.ExportStarted]


def test_folder_of_node_exporter_that_cannot_be_written_is_reported_once(
    folder: Path, tmp_path: Path, emitted: list[events.Event]
) -> None:
    collected = tmp_path / "textfile"
    collected.mkdir()
    with exporting(folder, emitted, MetricsOptions(textfile=str(collected))) as exports:
        shutil.rmtree(collected)
        for _ in range(3):
            exports._snapshot_at = 0.0
            exports.poll()
    (failed,) = [event for event in emitted if isinstance(event, events.ExportFailed)]
    assert "resilience-run-node.prom cannot be written" in failed.reason
    assert not collected.exists()


@pytest.mark.parametrize("is_file", [False, True])
def test_misspelt_folder_of_node_exporter_is_named_and_not_created(
    is_file: bool, folder: Path, tmp_path: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    misspelt = tmp_path / "txetfile"
    if is_file:
        misspelt.write_text("no folder")
    monkeypatch.setenv("RESILIENCE_METRICS_TEXTFILE", str(misspelt))
    monkeypatch.setenv("RESILIENCE_METRICS_PORT", "0")
    with exporting(folder, emitted):
        assert len(served_at(emitted)) == 1  # the endpoint is there nevertheless
    (failed,) = [event for event in emitted if isinstance(event, events.ExportFailed)]
    assert failed.is_at_start
    assert f"RESILIENCE_METRICS_TEXTFILE or --metrics-textfile is {misspelt}, which is no folder" in failed.reason
    assert not misspelt.is_dir()


def test_files_that_nobody_has_written_for_a_day_go_and_those_of_others_stay(
    folder: Path, tmp_path: Path, emitted: list[events.Event]
) -> None:
    collected = tmp_path / "textfile"
    collected.mkdir()
    for name, age in (("resilience-old-node.prom", 90_000), ("resilience-other-node.prom", 60), ("disks.prom", 1e6)):
        (collected / name).touch()
        os.utime(collected / name, (time.time() - age,) * 2)
    with exporting(folder, emitted, MetricsOptions(textfile=str(collected))):
        names = {path.name for path in collected.iterdir()}
    assert names == {"disks.prom", "resilience-other-node.prom", "resilience-run-node.prom"}


def test_names_that_are_too_long_for_a_file_are_cut_and_stay_apart() -> None:
    names = {prometheus.file_name("j" * 200, f"{'ñ' * 100}{number}") for number in range(3)}
    assert len(names) == 3
    assert all(len(name.encode()) <= 205 and name.endswith(".prom") for name in names)


# -- discovery ---------------------------------------------------------------------------------


def discovered(port: int) -> list[dict[str, object]]:
    with STRAIGHT.open(f"http://127.0.0.1:{port}/sd", timeout=30) as answer:
        assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
        found: list[dict[str, object]] = json.load(answer)
    return found


def test_every_node_tells_where_all_of_them_are(folder: Path, emitted: list[events.Event]) -> None:
    (folder.parent / ".targets").mkdir()
    (folder.parent / ".targets" / "run@@torn.json").write_text('[{"targets": [')
    (folder.parent / ".targets" / "run2@@node.json").write_text('[{"targets": ["another job"]}]')
    with exporting(folder, emitted, MetricsOptions(port=0), node="node-a"):
        with exporting(folder, emitted, MetricsOptions(port=0), node="node-b"):
            first, second = served_at(emitted)
            expected = [
                {
                    "targets": [f"127.0.0.1:{port}"],
                    "labels": {"job_id": "run", "node": node, "__param_job_id": "run", "discovery": "http"},
                }
                for node, port in (("node-a", first), ("node-b", second))
            ]
            assert discovered(first) == discovered(second) == expected
        assert discovered(first) == expected[:1]  # the other one has left


def test_discovery_that_its_folder_blocks_takes_no_connection_from_scrapes(
    folder: Path, emitted: list[events.Event]
) -> None:
    with exporting(folder, emitted, MetricsOptions(port=0)):
        (port,) = served_at(emitted)
        silent = folder.parent / ".targets" / "run@@silent.json"
        os.mkfifo(silent)  # its readers wait
        for _ in range(prometheus.MOST_CONNECTIONS + prometheus.ENDING + 1):
            with pytest.raises(urllib.error.HTTPError) as refused:
                discovered(port)
            assert refused.value.code == 503  # Prometheus keeps the nodes that it knows
        assert "resilience_" in scrape(port)
        os.close(os.open(silent, os.O_RDWR))
        silent.unlink()


@pytest.mark.parametrize(
    ("host", "named"), [("0.0.0.0", socket.gethostname()), ("::1", "[::1]"), ("localhost", "localhost")]
)
def test_address_is_announced_as_others_reach_it(
    host: str, named: str, folder: Path, emitted: list[events.Event]
) -> None:
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this host has no IPv6")
    with exporting(folder, emitted, MetricsOptions(port=0, host=host)):
        (port,) = served_at(emitted)
        (entry,) = json.loads((folder.parent / ".targets" / "run@@node.json").read_text())
        assert entry["targets"] == [f"{named}:{port}"]
        reached = {"0.0.0.0": "127.0.0.1"}.get(host, named)
        with STRAIGHT.open(f"http://{reached}:{port}/metrics", timeout=30) as answer:
            assert b"resilience_monitor_up" in answer.read()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_address_that_is_not_this_hosts_is_reported_and_nothing_else_happens(
    host: str, folder: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up, lookup = list[str](), socket.getaddrinfo

    def counted(host: str, *arguments: Any, flags: int = 0, **more: Any) -> Any:
        if not flags & socket.AI_NUMERICHOST:
            looked_up.append(host)
        return lookup(host, *arguments, flags=flags, **more)

    monkeypatch.setattr(socket, "getaddrinfo", counted)
    with exporting(folder, emitted, MetricsOptions(port=free_port(), host=host)):
        (failed,) = emitted
    assert isinstance(failed, events.ExportFailed) and failed.is_at_start
    assert f"RESILIENCE_METRICS_HOST or --metrics-host is {host!r}, which is no address of this host" in failed.reason
    assert looked_up == ([host] if " " in host else [])  # not once for each of the ports


def test_name_server_that_does_not_answer_holds_up_no_export_for_long(
    folder: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup, answers = socket.getaddrinfo, threading.Event()

    def waiting(*arguments: Any, flags: int = 0, **more: Any) -> Any:
        if not flags & socket.AI_NUMERICHOST:
            assert answers.wait(LIMIT)
        return lookup(*arguments, flags=flags, **more)

    monkeypatch.setattr(socket, "getaddrinfo", waiting)
    monkeypatch.setattr(prometheus, "LOOKUP_LIMIT", 0.1)
    with exporting(folder, emitted, MetricsOptions(port=free_port(), host="localhost")):
        (failed,) = emitted
        answers.set()
    assert isinstance(failed, events.ExportFailed) and failed.is_at_start
    assert "is 'localhost', whose address was not found within 0.1 s" in failed.reason


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not here: apt-get install prometheus prometheus-alertmanager")
def test_prometheus_finds_all_nodes_through_one_of_them(
    folder: Path, tmp_path: Path, emitted: list[events.Event]
) -> None:
    with (
        exporting(folder, emitted, MetricsOptions(port=0), node="node"),
        exporting(folder, emitted, MetricsOptions(port=0), node="two"),
    ):
        first, _ = served_at(emitted)
        discovery = {"url": f"http://127.0.0.1:{first}/sd", "refresh_interval": "1s"}
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "resilience", "http_sd_configs": [discovery]}],
        }
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
        options = [f"--config.file={tmp_path / 'prometheus.yaml'}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
        prometheus = Prometheus("prometheus", tmp_path, *options)
        try:
            prometheus.await_ready()
            prometheus.await_query('count(resilience_monitor_up{job_id="run"}) == 2')
            nodes = prometheus.label_values("resilience_monitor_up", "node", time.time() - LIMIT)
            assert nodes == ["node", "two"]
            restarts = 'resilience_restart_iterations_total{node="node",outcome="interrupted"}'
            assert [each["value"][1] for each in prometheus.await_query(restarts)] == ["1"]
        finally:
            prometheus.end()


# -- under the launcher ------------------------------------------------------------------------


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Callable[..., Launched]:
    return launcher(start, tmp_path)


def value(text: str, name: str, /, **labels: str) -> float:
    """The sum of the series of a metric that have these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def await_value(port: int, wanted: float, name: str, **labels: str) -> None:
    deadline = time.monotonic() + LIMIT
    seen: float | OSError = -1.0
    while isinstance(seen, OSError) or seen < wanted:
        assert time.monotonic() < deadline, f"{name} {labels} is {seen!r}, not {wanted}, after {LIMIT} s"
        try:
            seen = value(scrape(port), name, **labels)
        except OSError as error:
            seen = error  # it does not serve yet
        time.sleep(0.05)


def port_of(job: Launched, attempt: str) -> int:
    """Wait until the agent serves; return where: at another port than asked for, if that one is taken at the moment."""
    records = Account(job.folder / "runs" / attempt)
    deadline = time.monotonic() + LIMIT
    while True:
        for record in records.records():
            if isinstance(record.event, events.ExportStarted) and record.event.endpoint.startswith("http"):
                return urllib.parse.urlsplit(record.event.endpoint).port or 0
        exports = [each.event for each in records.records() if isinstance(each.event, events.ExportFailed)]
        assert time.monotonic() < deadline, (
            f"no endpoint after {LIMIT} s: {exports}{job.job.stacks(0)}{job.job.output()}"
        )
        time.sleep(0.05)


CRASHES = """
if cycle == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
say("up")
await_file("go", 300)
"""
CYCLES = {"layer": "launcher", "outcome": "interrupted"}


def test_counters_go_on_after_the_death_of_workers_and_begin_anew_with_the_next_attempt(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    port, collected = free_port(), tmp_path / "textfile"
    collected.mkdir()
    job = launch(CRASHES, "--metrics-port", str(port), "--metrics-textfile", str(collected))
    job.await_worker("up.1.0")
    job.await_worker("up.1.1")
    await_value(port_of(job, "job"), 1, "resilience_restart_iterations_total", **CYCLES)
    await_value(port_of(job, "job"), 1, "resilience_interruptions_total", origin="first")
    job.job.signal(0, signal.SIGKILL)
    job.wait_agent(0)
    job.job.ran_to_its_end = True
    for rank in range(2):
        (tmp_path / f"up.1.{rank}").unlink()
    # The scheduler starts the job anew: another attempt, with a folder and counters of its own.
    again = launch(CRASHES, "--metrics-port", str(port), "--metrics-textfile", str(collected))
    again.await_worker("up.1.0")
    await_value(port_of(again, "job@1"), 1, "resilience_restart_iterations_total", **CYCLES)
    (tmp_path / "go").touch()
    assert again.wait() == [0]
    runs = tmp_path / "runs"
    for path in (runs / "job@1" / "metrics" / "node0.prom", collected / "resilience-job@1-node0.prom"):
        text = path.read_text()
        assert value(text, "resilience_restart_iterations_total", **CYCLES) == 1
        assert value(text, "resilience_restart_iterations_total", layer="launcher", outcome="completed") == 1
    assert (runs / "job" / "metrics" / "node0.prom").exists() and (collected / "resilience-job-node0.prom").exists()


def test_what_torchelastic_tells_is_on_record_and_counted(launch: Callable[..., Launched], tmp_path: Path) -> None:
    job = launch("sys.exit(cycle == 0)", "--metrics-textfile", str(tmp_path))
    assert job.wait() == [0]
    measured = {record.event.name: record.event.value for record in job.of(events.ElasticMeasured)}
    assert measured["SimpleElasticAgent.run.success"] == 1
    assert measured["workers.default.run_total"] == 1
    told = [record.event for record in job.of(events.ElasticTold)]
    assert {"RENDEZVOUS", "SUCCEEDED"} <= {event.state for event in told}
    assert [event.duration_s is not None for event in told if event.state == "RENDEZVOUS"] == [True, True]
    text = (tmp_path / "resilience-job-node0.prom").read_text()
    rendezvous = {"call": "SimpleElasticAgent._rendezvous"}
    assert value(text, "resilience_elastic_calls_total", outcome="success", **rendezvous) == 2
    assert value(text, "resilience_elastic_call_duration_seconds_count", **rendezvous) == 2
    assert value(text, "resilience_elastic_events_total", source="AGENT", state="SUCCEEDED") == 1
    assert value(text, "resilience_elastic_events_total", source="WORKER", state="SUCCEEDED") == 2
    last = (job.account.folder / "metrics" / "node0.prom").read_text()
    assert value(last, "resilience_elastic_value", name="workers.run_total") == 1


# -- connections that ask for nothing ----------------------------------------------------------


CRASHES_LATER = """
if cycle == 0:
    say("up")
    await_file("crash")
    sys.exit(rank)
say("up")
await_file("go")
"""


def answer(connection: socket.socket) -> bytes:
    """Request the metrics. Return the first byte of the answer, nothing if the connection is refused.

    An accepted connection is answered, so one that is closed because its time is over does not pass as refused."""
    try:
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        return connection.recv(1)
    except (BrokenPipeError, ConnectionResetError):
        return b""


def is_open(connection: socket.socket) -> bool:
    """Return True if the server has not closed this connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


def test_agent_without_free_descriptors_restarts_its_workers_and_serves_no_metrics(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """The last ones are the job's: the limit leaves two more than that reserve."""
    port = free_port()
    job = launch(CRASHES_LATER, "--metrics-port", str(port))
    job.await_worker("up.0.0")
    job.await_worker("up.0.1")
    await_value(port, 0, "resilience_restart_iterations_total")
    agent = job.job.pids[0]
    limit = (len(os.listdir(f"/proc/{agent}/fd")) + 2) * 4 // 3
    assert limit // 4 < descriptors.SPARE
    resource.prlimit(agent, resource.RLIMIT_NOFILE, (limit, limit))
    with ExitStack() as open_ones:
        connect = partial(socket.create_connection, ("127.0.0.1", port), timeout=LIMIT)
        connections = [open_ones.enter_context(connect()) for _ in range(CONNECTIONS)]
        assert answer(connections[-1]) == b""  # the first two found descriptors
        (tmp_path / "crash").touch()
        job.await_worker("up.1.0")
        job.await_worker("up.1.1")
        (tmp_path / "go").touch()
        assert job.wait() == [0], job.job.output()


def test_hard_limit_of_open_files_near_the_need_costs_scrapes_and_no_restart(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """All connections that one may hold would take what the restart needs; without the reserve, the job ends here."""
    port = free_port()
    job = launch(CRASHES_LATER, "--metrics-port", str(port), OPEN_FILES="56")
    job.await_worker("up.0.0")
    job.await_worker("up.0.1")
    await_value(port, 0, "resilience_restart_iterations_total")
    assert resource.prlimit(job.job.pids[0], resource.RLIMIT_NOFILE) == (56, 56)
    with ExitStack() as idle:
        for _ in range(CONNECTIONS):
            idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LIMIT))
        job.await_record(events.ExportFailed, where=lambda event: "connections are refused" in event.reason)
        (tmp_path / "crash").touch()
        job.await_worker("up.1.0")
        job.await_worker("up.1.1")
        (tmp_path / "go").touch()
        assert job.wait() == [0], job.job.output()
    assert [record.event.outcome for record in job.of(events.CycleEnded)] == ["failed", "completed"]


def test_idle_connections_cost_neither_the_job_nor_the_scrape_anything(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    port = free_port()
    job = launch(CRASHES_LATER, "--metrics-port", str(port))
    job.await_worker("up.0.0")
    job.await_worker("up.0.1")
    await_value(port, 0, "resilience_restart_iterations_total")
    before = threads.count(job.job.pids[0])
    with ExitStack() as idle:
        connect = partial(socket.create_connection, ("127.0.0.1", port), timeout=LIMIT)
        connections = [idle.enter_context(connect()) for _ in range(300)]
        await_value(port, 0, "resilience_restart_iterations_total")  # all of them were accepted before this one
        assert sum(map(is_open, connections)) <= CONNECTIONS
        assert threads.count(job.job.pids[0]) <= before + THREADS
        (tmp_path / "crash").touch()
        job.await_worker("up.1.0")
        job.await_worker("up.1.1")
        (tmp_path / "go").touch()
        assert job.wait() == [0], job.job.output()


def test_connection_that_asks_for_nothing_is_closed(folder: Path, emitted: list[events.Event]) -> None:
    with exporting(folder, emitted, MetricsOptions(port=0)):
        (port,) = served_at(emitted)
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as idle:
            idle.sendall(b"GET /metr")
            assert idle.recv(1) == b""
        assert time.monotonic() - began >= SECONDS  # not before: a scrape may be slow


def test_scarce_descriptors_cost_connections_and_not_the_process(
    folder: Path, emitted: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    with exporting(folder, emitted, MetricsOptions(port=0)):
        (port,) = served_at(emitted)
        monkeypatch.setattr(descriptors, "are_scarce", lambda: True)
        with pytest.raises(OSError):
            scrape(port)
        monkeypatch.undo()
        assert "resilience_" in scrape(port)
