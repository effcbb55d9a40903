"""No duration and no used share of a limit includes the time in which a Wrapper lets a rank wait for the others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.telemetry import rank_snapshot, single_durations
from resilience.telemetry.durations import Value
from tests.process.launching import Launched, launcher
from tests.process.test_export import scrape
from tests.support.ranks import Job, free_port

Launch = Callable[..., Launched]

WAIT_S = 2.0
BEGIN = """
import json, resilience
from datetime import timedelta
from resilience.fault_tolerance import RankMonitorClient
from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess.rank_filter import MaxActiveWorldSize

def note(name, **seconds):
    (here / f"{name}.part").write_text(json.dumps(seconds))
    (here / f"{name}.part").rename(here / name)
"""
# Rank 1 is a spare in both calls: it waits from before the function of rank 0 begins until after its end.
SPARE = f"""
client = RankMonitorClient()
client.init_workload_monitoring()

calls = ["in section", "outside"]

@Wrapper(rank_filter=MaxActiveWorldSize(1), monitor_process_interval=timedelta(seconds=0.1))
def train(call: CallWrapper):
    began = time.monotonic()
    time.sleep({WAIT_S})
    note("wait." + calls.pop(0), waited=time.monotonic() - began)

if rank == 0:
    train(), train()
else:
    began = time.monotonic()
    resilience.step(0)
    client.send_heartbeat()
    client.start_section("epoch")
    time.sleep(0.1)
    train()
    note("opened", began=began)
    await_file("read")
    client.end_section("epoch")
    client.send_heartbeat()
    resilience.step(1)
    note("in section", took=time.monotonic() - began)
    began = time.monotonic()
    client.start_section("setup")
    client.end_section("setup")
    train()
    client.start_section("last")
    note("outside", took=time.monotonic() - began)
    client.end_section("last")
client.shutdown_workload_monitoring()
"""


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    return launcher(start, tmp_path)


def noted(job: Launched, name: str) -> dict[str, float]:
    seconds: dict[str, float] = json.loads((job.folder / name).read_text())
    return seconds


def longest(job: Launched, name: str) -> float:
    """Return the longest recorded duration of rank 1."""
    lines = [
        line for path in (job.job.run / "timings").glob("*-1.jsonl") for _, line in single_durations.read_values(path)
    ]
    return max(line.s for line in lines if isinstance(line, Value) and line.section == name)


def test_no_recorded_duration_and_no_used_share_includes_the_wait_of_a_spare(launch: Launch) -> None:
    port, limit = free_port(), 600.0
    job = launch(BEGIN + SPARE, "--ft-rank-section-timeouts", f"epoch:{limit:g}", "--metrics-port", str(port))
    job.job.await_sign_file(job.folder / "opened")
    prefix = "resilience_rank_section_used_ratio{"

    def used() -> list[float]:
        lines = [line for line in scrape(port).splitlines() if line.startswith(prefix) and 'section="epoch"' in line]
        return [float(line.split()[-1]) for line in lines]

    until = time.monotonic() + 60.0
    while not (shares := used()):
        assert time.monotonic() < until, scrape(port)
        time.sleep(0.1)
    open_s = time.monotonic() - noted(job, "opened")["began"]
    (job.folder / "read").touch()
    assert job.wait() == [0]
    assert max(shares) * limit <= open_s - noted(job, "wait.in section")["waited"]
    for name, call in (
        ("epoch", "in section"),
        ("heartbeat", "in section"),
        ("step", "in section"),
        ("out_of_section", "outside"),
    ):
        assert longest(job, name) <= noted(job, call)["took"] - noted(job, f"wait.{call}")["waited"], name
    assert longest(job, "epoch") >= 0.1  # what lies before the wait is part of it


# The function of rank 1 returns at once. That of rank 0 returns when the test has seen that rank 1 waits.
RETURNS = """
@Wrapper(monitor_process_interval=timedelta(seconds=0.1))
def train(call: CallWrapper):
    if rank == 1:
        resilience.step(0)
        resilience.heartbeat()
        with resilience.section("data"):
            pass
    else:
        await_file("go")

began = time.monotonic()
train()
if rank == 1:
    note("returned", took=time.monotonic() - began)
"""


def test_last_gaps_of_a_rank_whose_function_has_returned_end_with_the_function(launch: Launch) -> None:
    job = launch(BEGIN + RETURNS, "--metrics-port", "0")
    until = time.monotonic() + 60.0
    while not (
        (snapshot := rank_snapshot.read_all(job.job.run).get(1)) is not None
        and snapshot.doing == "waiting"
        and snapshot.step == 0
    ):
        assert time.monotonic() < until
        time.sleep(0.05)
    waits_from = time.monotonic()
    time.sleep(1.0)
    waited = time.monotonic() - waits_from
    (job.folder / "go").touch()
    assert job.wait() == [0]
    for name in ("step", "heartbeat", "out_of_section"):
        assert longest(job, name) <= noted(job, "returned")["took"] - waited, name
