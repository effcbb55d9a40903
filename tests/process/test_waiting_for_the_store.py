"""The process that hosts the store stands still; ranks that wait for it are no hung ranks.

How long it stands still is the fault itself: longer than the limits for a hang, shorter or
longer than barrier_timeout."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from resilience.facts import events
from tests.process.launching import launcher
from tests.support.account import Account
from tests.support.ranks import Job
from tests.support.stops import stop

Start = Callable[..., Job]
WAIT_FOR_SIGN = "tests.process.jobs:wait_for_sign"
LIMITS = {"soft_timeout": 4.0, "hard_timeout": 8.0, "progress_watchdog_interval": 0.25, "heartbeat_timeout": 5.0}


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def inside(job: Job, ranks: int) -> None:
    for rank in range(ranks):
        job.await_record(events.StageStarted, rank=rank, where=lambda event: event.stage == "run")


@pytest.mark.parametrize("fault", [pytest.param("none", marks=pytest.mark.slow), "exception"])
def test_host_of_the_store_that_goes_on_in_time_costs_nobody(start: Start, fault: str) -> None:
    job = start(3, WAIT_FOR_SIGN, options=LIMITS | {"barrier_timeout": 90.0, "completion_timeout": 90.0})
    inside(job, 3)
    if fault == "exception":
        (job.folder / "raise").touch()
    with stopped(job.monitor_pid(0)):
        (job.folder / "go").touch()  # all come to the barriers now
        time.sleep(14.0)
    restarts = int(fault == "exception")
    assert [rank.value for rank in job.wait(90.0)] == [restarts] * 3
    assert not job.of(events.RankSignalled)
    assert not job.of(events.RankFellSilent)
    assert len(job.interruptions()) == restarts


@pytest.mark.parametrize("how", ["stopped", pytest.param("gil_held", marks=pytest.mark.slow)])
def test_rank_that_stands_still_while_it_waits_for_the_store_costs_itself_alone(start: Start, how: str) -> None:
    job = start(3, WAIT_FOR_SIGN, options=LIMITS)
    inside(job, 3)
    with stopped(job.monitor_pid(0)):
        (job.folder / "go").touch()
        job.await_record(events.StageEnded, rank=2, where=lambda event: event.stage == "run")
        time.sleep(1.0)  # it comes to the store, which does not answer
        if how == "stopped":
            job.signal(2, signal.SIGSTOP)
        else:
            (job.folder / "gil").touch()
            time.sleep(1.0)
    ranks = job.wait(60.0)  # half of barrier_timeout
    # The others restart, or have completed: what rank 2 asked for before it was stopped is done when the store goes on.
    assert ranks[0].value == ranks[1].value
    assert ranks[0].value in (0, 1)
    assert ranks[2].signal is not None
    assert {record.event.limit for record in job.of(events.RankFellSilent, rank=2)} == {"watchdog"}


def test_rank_that_stands_still_before_its_first_store_operation_costs_itself_alone(start: Start) -> None:
    job = start(3, "tests.process.jobs:stop_at_the_start_of_the_call", options=LIMITS)
    ranks = job.wait(60.0)  # half of barrier_timeout
    assert ranks[0].value == ranks[1].value  # the first iteration begins without rank 2
    assert ranks[0].value is not None
    assert ranks[2].signal is not None
    assert {record.event.limit for record in job.of(events.RankFellSilent, rank=2)} == {"watchdog"}


@pytest.mark.parametrize("monitor_is_late", [pytest.param(False, marks=pytest.mark.slow), True])
def test_host_of_the_store_that_goes_on_in_time_costs_nobody_in_init_process_group(
    start: Start, monitor_is_late: bool
) -> None:
    limits = LIMITS | {"barrier_timeout": 90.0, "termination_grace_time": 0.5}
    late = {"monitor_is_late": monitor_is_late}
    job = start(2, "tests.process.jobs:build_a_group_when_asked", options=limits, **late)
    inside(job, 2)
    if monitor_is_late:
        job.await_sign("beginning", 1)
    with stopped(job.monitor_pid(0)):
        job.let_on("beginning")
        (job.folder / "go").touch()
        time.sleep(14.0)
    assert [rank.value for rank in job.wait(90.0)] == [0, 0]
    assert not job.of(events.RankSignalled)
    assert not job.of(events.RankFellSilent)
    assert not job.interruptions()


@pytest.mark.slow
def test_wait_in_init_process_group_ends_its_rank_once_the_host_has_stayed_away_for_long(start: Start) -> None:
    limits = LIMITS | {"barrier_timeout": 10.0, "termination_grace_time": 0.5}
    job = start(2, "tests.process.jobs:build_a_group_when_asked", options=limits)
    inside(job, 2)
    began = time.monotonic()
    with stopped(job.monitor_pid(0)):
        (job.folder / "go").touch()
        job.await_record(events.RankSignalled, rank=1)
    assert time.monotonic() - began >= 8.0 + 10.0 - 0.5  # its last sign of life may be a little older
    job.wait(90.0)
    (hard,) = [each.event for each in job.of(events.RankFellSilent, rank=1) if each.event.severity == "hard"]
    assert hard.allowed_s == 8.0
    assert hard.silent_for_s >= 8.0


@pytest.mark.slow
def test_host_of_the_store_that_stays_away_ends_each_rank_with_a_clear_error(start: Start) -> None:
    job = start(3, WAIT_FOR_SIGN, options=LIMITS | {"barrier_timeout": 10.0})
    inside(job, 3)
    with stopped(job.monitor_pid(0)):
        (job.folder / "go").touch()
        ranks = job.wait_ranks(120.0)
        for rank in (1, 2):  # their monitors end too, although the store does not answer them either
            job.await_record(events.MonitorEnded, rank=rank, role="monitor", limit=90.0)
    assert not job.of(events.RankSignalled)
    for rank in ranks:
        assert rank.type == "StoreError"
        # The rank's own operation, or its watcher's, whichever of them has waited for the whole limit first.
        assert re.search(r"did not answer \w+ of '0/(completion|outcome).*' within 1\d\.\d s", rank.error)
        for part in (" s; the limit is 10 s (barrier_timeout)", "Check it"):
            assert part in rank.error
    job.wait(90.0)


# -- under the launcher ------------------------------------------------------------------------------------------

WRAPPED = """
from datetime import timedelta
from resilience.inprocess import Wrapper

(here / "port").write_text(os.environ["MASTER_PORT"])

@Wrapper(
    soft_timeout=timedelta(seconds=4),
    hard_timeout=timedelta(seconds=8),
    heartbeat_timeout=timedelta(seconds=5),
    barrier_timeout=timedelta(seconds=BARRIER),
)
def train():
    say("inside")
    await_file("go")

train()
say("done")
"""


def launched(start: Start, folder: Path, barrier: int, conf: str = "") -> tuple[Any, int]:
    """Start two workers; return the job, once both are in the function, and the pid of its store process."""
    job = launcher(start, folder)(WRAPPED.replace("BARRIER", str(barrier)), conf=conf, UNRESUMED="yes")
    for rank in range(2):
        job.await_worker(f"inside.0.{rank}")
    port = int((folder / "port").read_text())
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        for process in psutil.Process(job.job.pids[0]).children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                if any(at.status == "LISTEN" and at.laddr.port == port for at in process.net_connections()):
                    return job, process.pid
    raise AssertionError(f"no process listens on port {port}")


def told(job: Any, kind: type[events.Event]) -> list[object]:
    return [record.event for record in Account(job.account.folder).records() if isinstance(record.event, kind)]


def test_store_process_of_the_launcher_that_goes_on_in_time_costs_nobody(start: Start, tmp_path: Path) -> None:
    job, store = launched(start, tmp_path, barrier=90)
    with stopped(store):
        (tmp_path / "go").touch()
        time.sleep(14.0)
    assert job.wait(120.0) == [0]
    for rank in range(2):
        assert (tmp_path / f"done.0.{rank}").exists()
    assert told(job, events.RankSignalled) == told(job, events.RankInterrupted) == []


@pytest.mark.slow
def test_store_process_of_the_launcher_that_stays_away_ends_the_job(start: Start, tmp_path: Path) -> None:
    # Time enough for the workers to give up and say so, also on a busy machine, before the agent ends them.
    job, store = launched(start, tmp_path, barrier=10, conf="store_timeout=60")
    stop(store)
    (tmp_path / "go").touch()
    assert job.wait(180.0) == [1]  # and no process is left
    assert "did not answer for 60 s (store_timeout)" in job.output(0, 2)
    output = "".join(path.read_text() for path in (job.account.folder / "output").rglob("*.err"))
    assert "StoreError: the store did not answer" in output
