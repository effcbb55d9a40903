"""Data loader workers do not outlive a rank that was killed."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from resilience.core import events
from resilience.monitor.evidence import SAMPLE_EVERY
from resilience.telemetry.rank_snapshot import read_all
from tests.support.ranks import LOOK_EVERY, Job
from tests.support.signs import await_file

Start = Callable[..., Job]


def _await_look(job: Job, after: float) -> None:
    """Wait until the monitor of rank 1 has looked at it after this moment, on the monotonic clock."""
    deadline = after + 60.0
    while (shown := read_all(job.run).get(1)) is None or shown.written_at < after:
        assert time.monotonic() < deadline, shown
        time.sleep(LOOK_EVERY)


def test_data_loader_workers_of_a_killed_rank_are_ended_though_nobody_reads_their_results(start: Start) -> None:
    """Torch's own check does not help: on their way out they wait for their results to be read."""
    job = start(2, "tests.process.loading:killed_beside_a_full_queue")
    await_file(job.folder / "workers", 120.0)
    workers = [psutil.Process(int(pid)) for pid in (job.folder / "workers").read_text().split()]
    names = {worker.name() for worker in workers}
    _await_look(job, time.monotonic() + SAMPLE_EVERY)
    (job.folder / "go").touch()
    assert job.wait()[0].value == (1, 1)
    _, alive = psutil.wait_procs(workers, 60.0)
    assert (names, alive) == ({"pt_data_worker"}, [])
    (killed,) = job.of(events.LoaderWorkersKilled, rank=1, role="monitor")
    assert set(killed.event.pids) <= {worker.pid for worker in workers}
