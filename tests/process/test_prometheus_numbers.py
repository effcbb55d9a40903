"""A real job under a real Prometheus: five numbers, asked as the dashboards ask, are those of the job's records."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.generator.boards.sections import SECTIONS
from dashboards.generator.queries import goodput, grown, quantile, restarts
from resilience.facts import events
from resilience.telemetry.catalogue import BY_NAME
from resilience.telemetry.metrics import READ_S
from tests.fixtures import count
from tests.process.dashboard_scene import filled
from tests.process.launching import launcher
from tests.support.prometheus import MISSING, Prometheus
from tests.support.ranks import Job, free_port

pytestmark = [
    pytest.mark.skipif("prometheus" in MISSING, reason="no prometheus here: apt-get install prometheus"),
    pytest.mark.timeout(900),
]

RANKS, FAULTS, SLOW_EVERY, SLOW_S = 4, 2, 10, 0.25
SAVED_EVERY, STEP_S = 5, 0.02
RESTART, SECTION = "resilience_restart_duration_seconds", "resilience_section_duration_seconds"
SILENCE = "resilience_rank_silence_seconds"
LOST = "resilience_lost_seconds_total"
MOMENT = 0.5  # seconds of each rank that its values may be older, or newer, than a scrape
TRAIN = f"""
import resilience

longest = 0.0

def first_step():
    return {SAVED_EVERY} * len(list(here.glob("saved.*")))

def meet(step):  # ranks make each step together, as with a collective
    (here / f"at.{{cycle}}.{{step}}.{{rank}}").touch()
    while len(list(here.glob(f"at.{{cycle}}.{{step}}.*"))) < size:
        time.sleep(0.005)

for step in range(first_step(), 10**6):
    if (cycle, rank, step) == (0, 1, 33):
        raise ValueError("broken, by schedule")
    resilience.step(step)
    entered = time.monotonic()
    with resilience.section("train"):
        time.sleep({SLOW_S} if step % {SLOW_EVERY} == 0 else {STEP_S})
        if (cycle, rank, step) == (1, 2, 63):
            time.sleep(600)
    if (took := time.monotonic() - entered) > longest:
        longest = took
        (here / f"took.{{took}}").touch()
    if rank == 0 and (here / "end").exists():
        (here / f"last.{{step}}").touch()
    meet(step)
    if (step + 1) % {SAVED_EVERY} == 0:
        (here / f"saved.{{step}}").touch()
    if (here / f"last.{{step}}").exists():  # all ranks see it, or none
        break
"""


@pytest.fixture
def prometheus(tmp_path: Path) -> Any:
    """A Prometheus that scrapes all jobs in the folder every second, from before the job begins."""
    folder = tmp_path / "prometheus"
    folder.mkdir()
    files = {"files": [str(tmp_path / "runs" / ".targets" / "*.json")], "refresh_interval": "1s"}
    config = {"global": {"scrape_interval": "1s"}}
    config["scrape_configs"] = [{"job_name": "resilience", "file_sd_configs": [files]}]  # type: ignore[assignment]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    options = (f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}")
    server = Prometheus("prometheus", folder, *options)
    try:
        server.await_ready()
        yield server
    finally:
        server.end()


def test_dashboards_have_the_numbers_of_the_records(
    prometheus: Prometheus, start: Callable[..., Job], tmp_path: Path
) -> None:
    options = ("--max-restarts", "5", "--ft-rank-section-timeouts", "train:8", "--metrics-port", str(free_port()))
    job = launcher(start, tmp_path)(TRAIN, *options, nproc=RANKS, RESILIENCE_JOB_ID="job")
    prometheus.await_query(f'{RESTART}_count{{job_id="job"}} == {FAULTS * RANKS}', limit=180)
    prometheus.await_query(f'sum({SECTION}_count{{job_id="job"}}) > 400', limit=180)
    gone_on = max(record.wall_ns for record in job.of(events.WorkerProgressed)) / 1e9
    prometheus.await_query(f'timestamp({LOST}{{job_id="job", cause="restart"}}) > {gone_on + READ_S + 1}', limit=180)
    asked, at = answers(prometheus)
    moment = MOMENT + asked["scrape"]  # since the scrape's time stamp, which is that of its beginning
    (tmp_path / "end").touch()
    assert job.wait(120) == [0]

    files = count.read(job.job.run)
    told = count.count(job.job.run)["restarts"]["launcher"]
    assert asked["restarts"] == len(whys(files)) - 1 == FAULTS
    assert len(told) == FAULTS * RANKS
    for share in (0.5, 0.95):
        assert_in_the_bucket_of(told, share, asked[f"p{share}"], RESTART)
    spent = spent_until(files, at - READ_S)
    for cause in ("startup", "restart", "hang", "rework", "idle"):
        assert asked[cause] == pytest.approx(spent[cause], abs=1e-3), cause
    repeated = (33 - 1) % SAVED_EVERY + 63 % SAVED_EVERY  # rank 1 raised before its step 33, rank 2 hung in its step 63
    assert asked["rework"] >= RANKS * repeated * STEP_S
    outside = spent["startup"] + spent["restart"] + spent["idle"]
    ettr = (spent["work"] - spent["hang"] - spent["rework"]) / (spent["work"] + outside)
    assert asked["ettr"] == pytest.approx(ettr, abs=moment * RANKS / (spent["work"] + outside))
    assert asked["ranks with a silence"] == RANKS  # test_silence_at_the_endpoint has their values
    # A tenth of the sections sleep this long, and none took longer than the script has seen.
    longest = max(float(path.name.removeprefix("took.")) for path in tmp_path.glob("took.*"))
    assert bucket_of(SLOW_S, SECTION)[0] <= asked["section p99"] <= bucket_of(longest, SECTION)[1]


def answers(prometheus: Prometheus) -> tuple[dict[str, float], float]:
    """Ask as the dashboards do, at the moment of the last scrape; return that too, in Unix seconds."""
    (series,) = prometheus.matrix('resilience_productive_seconds_total{job_id="job"}[5m]')
    at = float(series["values"][-1][0])
    named = {"job": "job", "node": ".*", "__range": "600s", "__range_s": "600", "__rate_interval": "600s"}

    def value(query: str) -> float:
        found = prometheus.instant(filled(query, named), at)
        assert len(found) <= 1, query
        return float(found[0]["value"][1]) if found else 0.0

    causes = {name: value(grown(LOST, f'cause="{name}"')) for name in ("startup", "restart", "hang", "rework", "idle")}
    quantiles = {f"p{q}": value(quantile(q, grown(f"{RESTART}_bucket", by=("le",)))) for q in (0.5, 0.95)}
    (panel,) = (each for each in SECTIONS.panels() if each.title == "Section duration, 99th percentile, and limit")
    return {
        "restarts": value(restarts()),
        "ettr": value(goodput()),
        "section p99": value(panel.queries[0].expr),
        "ranks with a silence": value(f'count({SILENCE}{{job_id="job"}})'),
        "scrape": value('scrape_duration_seconds{job_id="job"}'),
        **causes,
        **quantiles,
    }, at


def whys(files: dict[str, list[dict[str, Any]]]) -> set[int]:
    """The cycles that began."""
    records = itertools.chain.from_iterable(files.values())
    return {r["origin"].get("cycle", 0) for r in records if r["event"]["event"] == "cycle.started"}


def spent_until(files: dict[str, list[dict[str, Any]]], at: float) -> dict[str, float]:
    """Where the time of all ranks had gone at a moment, by the records until then."""
    some = next(iter(files.values()))[0]
    until = round(at * 1e9) - some["wall_ns"] + some["mono_ns"]
    seen = {name: [r for r in records if r["mono_ns"] <= until] for name, records in files.items()}
    return count.spent(seen, until)


def assert_in_the_bucket_of(values: list[float], share: float, shown: float, metric: str) -> None:
    """A quantile lies in the same bucket as the value that it stands for."""
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    below, edge = bucket_of(exact, metric)
    assert below <= shown <= edge, (exact, shown)


def bucket_of(value: float, metric: str) -> tuple[float, float]:
    """Return the two edges of the bucket that holds a value."""
    return next((below, edge) for below, edge in itertools.pairwise(BY_NAME[metric].buckets) if value <= edge)
