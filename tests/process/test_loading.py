"""Data loader workers do not outlive a rank that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.limits import Limits
from resilience.monitor import loader_workers, messages
from resilience.monitor.evidence import SAMPLE_EVERY
from resilience.monitor.program import Program
from resilience.system import processes
from resilience.system.channel import Channel, listen, pair
from resilience.telemetry.rank_snapshot import read_all
from resilience.telemetry.recording import RecordTail
from tests.support.ranks import LOOK_EVERY, Job
from tests.support.signs import await_file

Start = Callable[..., Job]


def _await_look(job: Job, after: float) -> None:
    """Wait until the monitor of rank 1 has looked at it after this moment, on the monotonic clock."""
    deadline = after + 60.0
    while (shown := read_all(job.run).get(1)) is None or shown.written_at < after:
        assert time.monotonic() < deadline, shown
        time.sleep(LOOK_EVERY)


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_data_loader_workers_of_a_killed_rank_are_ended_though_nobody_reads_their_results(
    start: Start, method: str
) -> None:
    """Torch's own check does not help: on their way out they wait for their results to be read. Of a fork server they
    wait for the end of the server, which waits for theirs."""
    job = start(2, "tests.process.loading:killed_beside_a_full_queue", method=method)
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


def test_data_loader_worker_that_was_forked_just_before_its_rank_was_killed_is_ended(start: Start) -> None:
    """Torch's worker then takes its new parent for its rank, and stays for ever."""
    job = start(2, "tests.process.loading:killed_while_its_worker_starts")
    assert job.wait()[0].value == (1, 1)
    worker = int((job.folder / "workers").read_text())
    (killed,) = job.of(events.LoaderWorkersKilled, rank=1, role="monitor")
    assert killed.event.pids == (worker,)


RANK = """
import os, time
worker = os.fork()
if worker == 0:
    open("/proc/self/comm", "w").write("pt_data_worker")
    os.write(1, f"{os.getpid()}\\n".encode())
time.sleep(3600)
"""


def _await_message(line: Channel, kind: type[messages.ToAgent]) -> None:
    deadline = time.monotonic() + 60.0
    while (data := line.receive(1.0)) is None or not isinstance(messages.decode_for_agent(data), kind):
        assert time.monotonic() < deadline


def test_launchers_monitor_stays_alive_while_loader_workers_of_a_dead_rank_may_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are killed at the latest when the monitor itself ends."""
    monkeypatch.setattr(loader_workers, "GRACE", 3600.0)
    line, agents_line = pair()
    listener = listen(tmp_path / "socket")
    program = Program(line, listener)
    monitor = threading.Thread(target=program.run)
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE)
    assert rank.stdout is not None
    worker = psutil.Process(int(rank.stdout.readline()))
    try:
        monitor.start()
        origin = Origin("job", "n", "rank", rank.pid, initial_rank=0, rank=0, world_size=1)
        start_time = processes.identity_of(rank.pid)[1]
        assigned = messages.Assigned(rank.pid, start_time, origin, bytes(tmp_path / "run"), Limits())
        agents_line.send(messages.encode(messages.OpenMonitor(os.getpid())))
        agents_line.send(messages.encode(assigned))
        deadline = time.monotonic() + 60.0
        while (watch := program._worker) is None:
            assert time.monotonic() < deadline
            time.sleep(LOOK_EVERY)
        watch.loader_workers.look(rank.pid)
        rank.kill()
        _await_message(agents_line, messages.Gone)
        agents_line.send(messages.encode(messages.ProbeMonitor(1)))
        _await_message(agents_line, messages.Alive)
        assert worker.is_running()
        agents_line.send(messages.encode(messages.Leave()))
        monitor.join(60.0)
        psutil.wait_procs([worker], 60.0)
        assert not worker.is_running()
        (record,) = [
            record
            for record in RecordTail(tmp_path / "run" / "records" / "n-0.jsonl").added()
            if isinstance(record.event, events.LoaderWorkersKilled)
        ]
        assert record.event.pids == (worker.pid,)
    finally:
        rank.kill()
        rank.communicate()
        if worker.is_running():
            worker.kill()
        agents_line.close()
        monitor.join(60.0)
        line.close()
        listener.close()
