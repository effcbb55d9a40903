"""A job that is killed or fails pages, a job that completes does not, and Prometheus learns it from files alone."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilience.facts import events
from resilience.telemetry.dashboard_files import write
from resilience.telemetry.targets import FOLDER
from tests.process.launching import Launched, launcher
from tests.process.test_export import STRAIGHT
from tests.support.prometheus import MISSING, Watching, watching
from tests.support.ranks import Job, free_port

LIMIT = 60.0  # seconds that anything may take
SCRIPT = """
say("up")
await_file("go", 300)
sys.exit(int((here / "go").read_text()))
"""


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Callable[..., Launched]:
    return launcher(start, tmp_path)


def entries(folder: Path) -> dict[str, dict[str, str]]:
    """The labels of the entries that are there, by the name of their file."""
    return {path.name: json.loads(path.read_text())[0]["labels"] for path in (folder / "runs" / FOLDER).glob("*.json")}


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def begin(launch: Callable[..., Launched], folder: Path, *options: str) -> Launched:
    (folder / "go").unlink(missing_ok=True)
    for path in folder.glob("up.*"):
        path.unlink()
    job = launch(SCRIPT, "--max-restarts", "0", "--metrics-port", str(free_port()), *options)
    job.await_worker("up.0.0")
    until(lambda: any(name.endswith("@@node0.json") for name in entries(folder)))
    return job


def end(job: Launched, folder: Path, code: int) -> None:
    (folder / "go.new").write_text(str(code))
    (folder / "go.new").rename(folder / "go")
    job.wait()


def kill(job: Launched) -> None:
    job.job.signal(0, signal.SIGKILL)
    job.wait_agent(0)
    job.job.ran_to_its_end = True


def test_job_that_completes_leaves_no_entry(launch: Callable[..., Launched], tmp_path: Path) -> None:
    end(begin(launch, tmp_path), tmp_path, 0)
    assert entries(tmp_path) == {}


def test_job_that_fails_leaves_an_entry_that_says_so(launch: Callable[..., Launched], tmp_path: Path) -> None:
    end(begin(launch, tmp_path), tmp_path, 3)
    assert entries(tmp_path) == {"job@@.json": {"job_id": "job", "outcome": "failed"}}


def test_completed_job_leaves_no_entry_of_a_node_that_was_lost(launch: Callable[..., Launched], tmp_path: Path) -> None:
    conf = "keep_alive_interval=0.2,keep_alive_max_attempt=25,last_call_timeout=60"
    script = 'say("up")\nif size == 2:\n    await_file("never")'
    job = launch(script, "--metrics-port", str(free_port()), nodes="1:2", agents=2, nproc=1, conf=conf)
    job.await_worker("up.0.0")
    job.await_worker("up.0.1")
    until(lambda: set(entries(tmp_path)) == {"job@@node0.json", "job@@node1.json"})
    job.job.signal(1, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(job.wait_agent(0).status) == 0
    job.wait_agent(1)
    job.job.ran_to_its_end = True
    assert entries(tmp_path) == {}


@pytest.mark.parametrize("missing", ["limits", "environment"])
def test_agent_that_fails_by_an_exception_records_the_end_of_the_job(
    missing: str, launch: Callable[..., Launched], tmp_path: Path
) -> None:
    job = launch("", "--metrics-port", str(free_port()), LACKS=missing)
    assert job.wait() == [1]
    (ended,) = job.of(events.JobEnded)
    assert (ended.event.outcome, ended.event.exit_code) == ("failed", 1)
    assert ended.event.detail.startswith("the agent of node0 failed: ")
    assert entries(tmp_path) == {"job@@.json": {"job_id": "job", "outcome": "failed"}}


def test_node_that_a_running_job_refuses_leaves_no_entry_of_a_failed_job(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    conf = "keep_alive_interval=0.2,keep_alive_max_attempt=25,last_call_timeout=0.1"
    options = {"nodes": "1:2", "nproc": 1, "conf": conf, "SLURM_PROCID": "0"}
    job = launch('say("up")\nawait_file("go")', "--metrics-port", str(free_port()), **options)
    job.await_worker("up.0.0")
    twin = job.more()
    assert twin.wait() == [2]
    (ended,) = twin.of(events.JobEnded)
    assert (ended.origin.node, ended.event.outcome, ended.event.exit_code) == ("node1", "excluded", 2)
    assert set(entries(tmp_path)) == {"job@@node0.json"}
    (tmp_path / "go").touch()
    assert job.wait() == [0]


def test_file_for_node_exporter_says_how_the_job_ended(launch: Callable[..., Launched], tmp_path: Path) -> None:
    collected = tmp_path / "textfile"
    collected.mkdir()
    end(begin(launch, tmp_path, "--metrics-textfile", str(collected)), tmp_path, 3)
    text = (collected / "resilience-job-node0.prom").read_text()
    assert 'resilience_ended_timestamp_seconds{job_id="job",node="node0",outcome="failed"} 1.' in text
    assert 'resilience_written_timestamp_seconds{job_id="job",node="node0"} 1.' in text
    assert "resilience_ranks{" not in text  # they are no more


def test_entry_of_a_killed_job_does_not_lead_to_a_later_one_on_its_port(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    killed = begin(launch, tmp_path)
    kill(killed)
    (path,) = (tmp_path / "runs" / FOLDER).glob("job@@node0.json")
    (entry,) = json.loads(path.read_text())
    port = entry["targets"][0].rpartition(":")[2]
    later = begin(launch, tmp_path, "--metrics-port", port)
    until(lambda: "job@1@@node0.json" in entries(tmp_path))
    url = f"http://127.0.0.1:{port}/metrics?job_id="
    with STRAIGHT.open(url + "job%401", timeout=30) as answer:
        assert b"resilience_run_info" in answer.read()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        STRAIGHT.open(url + entry["labels"]["__param_job_id"], timeout=30)
    end(later, tmp_path, 0)
    assert set(entries(tmp_path)) == {"job@@node0.json"}


def test_ranks_without_the_launcher_that_are_asked_to_stop_have_not_failed(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    collected = tmp_path / "textfile"
    collected.mkdir()
    env = {"RESILIENCE_METRICS_PORT": "0", "RESILIENCE_METRICS_TEXTFILE": str(collected)}
    job = start(3, "tests.process.jobs:wait_for_sign", env=env)
    for rank in range(3):
        job.await_record(events.IterationStarted, rank=rank)
    until(lambda: entries(tmp_path) != {})
    for rank in range(3):
        job.signal(rank, signal.SIGTERM)
    job.wait()
    assert entries(tmp_path) == {}
    (path,) = collected.iterdir()
    assert 'outcome="stopped"' in path.read_text()


@contextmanager
def watched(folder: Path) -> Iterator[Watching]:
    """A Prometheus that finds the jobs of a run directory, with our rules."""
    exported = folder / "exported"
    write(exported)
    (folder / "servers").mkdir()
    with watching(folder / "servers", exported, [str(folder / "runs" / FOLDER / "*.json")]) as servers:
        yield servers


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not here: apt-get install prometheus prometheus-alertmanager")
def test_killed_and_failed_jobs_page_and_a_completed_one_does_not(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    with watched(tmp_path) as servers:
        prometheus = servers.prometheus
        for number, finish in enumerate(
            [lambda job: end(job, tmp_path, 0), lambda job: end(job, tmp_path, 3), lambda job: kill(job)]
        ):
            name = "job" + (f"@{number}" if number else "")
            job = begin(launch, tmp_path)
            prometheus.await_query(f'resilience_build_info{{job_id="{name}"}}')
            prometheus.await_query(f'job:up:max{{job_id="{name}"}} == 1')
            finish(job)
        failed, gone = servers.pager.await_page("JobFailed"), servers.pager.await_page("JobGone")
        assert (failed["labels"]["job_id"], gone["labels"]["job_id"]) == ("job@1", "job@2")
        assert failed["annotations"]["run_folder"] == str(tmp_path / "runs" / "job@1")
        assert failed["annotations"]["command"] == f"resilience report '{tmp_path / 'runs' / 'job@1'}'"
        ends = {"JobFailed", "JobGone"}
        paged = {(each["labels"]["alertname"], each["labels"]["job_id"]) for each in servers.pager.paged}
        assert {each for each in paged if each[0] in ends} == {("JobFailed", "job@1"), ("JobGone", "job@2")}
