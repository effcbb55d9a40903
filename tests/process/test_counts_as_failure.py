"""What counts as a failure: ends of workers that look like something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.core import events
from tests.process.launching import Launched, launcher
from tests.process.told import only_incident
from tests.support.ranks import Job

Launch = Callable[..., Launched]


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    return launcher(start, tmp_path)


# -- a worker that was ended for a hang -----------------------------------------------------------------

HANGS_AND_EXITS_WITH_0 = """
import resilience
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
resilience.heartbeat()
if cycle == 0 and rank == 0:
    await_file("never")
"""


@pytest.mark.parametrize("nproc", [1, 2])
def test_worker_that_exits_with_0_when_it_is_ended_for_a_hang_has_failed(launch: Launch, nproc: int) -> None:
    limits = ("--ft-rank-heartbeat-timeout", "1", "--ft-rank-termination-signal", "SIGTERM")
    job = launch(HANGS_AND_EXITS_WITH_0, *limits, nproc=nproc)
    assert job.wait() == [0]
    assert [record.event.outcome for record in job.of(events.CycleEnded)] == ["failed", "completed"]
    exits = {(r.origin.cycle, r.event.worker_rank): r.event for r in job.of(events.WorkerExited)}
    assert (exits[0, 0].code, exits[0, 0].expected) == (0, False)
    incident = only_incident(job)
    assert (incident.kind, incident.verdict.first, incident.status) == ("hard_timeout", 0, "restarted")


def test_job_that_only_hangs_and_has_no_restart_left_does_not_exit_with_0(launch: Launch) -> None:
    limits = ("--ft-rank-heartbeat-timeout", "1", "--ft-rank-termination-signal", "SIGTERM")
    job = launch(HANGS_AND_EXITS_WITH_0, *limits, "--max-restarts", "0", nproc=1)
    assert job.wait() == [1]
    assert job.of(events.JobEnded)[0].event.outcome == "exhausted"
