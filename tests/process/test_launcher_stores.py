"""Stores that do not answer or are gone, as an agent meets them: at its start, while workers run, and when it is
asked to stop. And hosts that lack what a start needs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from resilience.facts import events
from resilience.launcher.signals import Signals
from resilience.report.condensed import report
from resilience.run_folder.load import load
from tests.process.launching import NO_NODE_IS_LOST, Launched, launcher
from tests.support.pids import children_named
from tests.support.ranks import Job
from tests.support.signs import await_true
from tests.support.stops import stop

Launch = Callable[..., Launched]
WAIT = "say('up')\nawait_file('go')"


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    return launcher(start, tmp_path)


def store_process(agent: int) -> psutil.Process | None:
    """Return an agent's store process, None while there is none."""
    return next(iter(children_named(agent, "res-store")), None)


def store_of(agent: int) -> psutil.Process:
    """Return an agent's store process."""
    process = store_process(agent)
    assert process is not None
    return process


# -- the start ----------------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        server.settimeout(120.0)
        yield server


def start_at(launch: Launch, server: socket.socket, conf: str) -> Launched:
    """Start an agent whose job's store is said to be there."""
    endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    return launch(WAIT, nodes="2", agents=1, endpoint=endpoint, per_agent=({"PET_RDZV_CONF": conf},))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_start_of_an_agent_whose_store_is_silent(
    launch: Launch, silent: socket.socket, number: signal.Signals
) -> None:
    job = start_at(launch, silent, "is_host=0")
    with contextlib.ExitStack() as clients:
        while not clients.enter_context(silent.accept()[0]).recv(1):
            pass  # a probe; torch's client sends something, and now waits for an answer
        job.job.signal(0, number)
        assert job.wait() == [128 + number]
    assert f"{number.name} arrived before the rendezvous was reached" in job.output(0, 2)


def test_signal_ends_an_agent_that_agrees_on_a_run_folder_in_a_store_that_falls_silent(launch: Launch) -> None:
    job = launch(WAIT, nodes="2", agents=1)
    job.await_arrival("node0")
    keys = job.rendezvous()
    keys.delete_key("job/launch")  # so that the second node waits for the first one's folder
    before = keys.num_keys()
    second = job.more()
    await_true(lambda: keys.num_keys() > before)  # it counts
    store = store_of(job.job.pids[0])
    stop(job.job.pids[0], store.pid)  # an agent continues its own store
    second.job.signal(0, signal.SIGTERM)
    assert second.wait() == [128 + signal.SIGTERM]
    assert "SIGTERM arrived before the " in second.output(0, 2)
    store.kill()
    job.job.signal(0, signal.SIGKILL)
    assert job.wait() == [-signal.SIGKILL]


def test_silent_store_at_the_start_is_given_up_after_the_join_timeout(launch: Launch, silent: socket.socket) -> None:
    job = start_at(launch, silent, "is_host=0,join_timeout=1")
    assert job.wait() == [1]
    assert "was not reached within 1 s: OSError: a server listens there, but does not answer" in job.output(0, 2)


def test_agent_that_reaches_no_store_says_why_it_could_not_host_it(launch: Launch, silent: socket.socket) -> None:
    job = start_at(launch, silent, "join_timeout=1")  # the endpoint is this host, and the port is taken
    assert job.wait() == [1]
    (line,) = [line for line in job.output(0, 2).splitlines() if "was not reached within 1 s" in line]
    assert "this node, which the endpoint names, could not host it: " in line and "ddress already in use" in line


def test_workers_start_cold_if_the_zygote_cannot_be_forked(launch: Launch) -> None:
    job = launch("", nproc=1, LACKS="process")
    assert job.wait() == [0]
    (started,) = job.of(events.WorkerStarted)
    assert started.event.how == "cold"
    why = "the zygote could not be forked: [Errno 11] Resource temporarily unavailable"
    assert started.event.why_cold.startswith(why)


def test_agent_without_a_thread_for_its_heartbeat_says_so_without_a_traceback(launch: Launch) -> None:
    job = launch("", nproc=1, LACKS="thread")
    assert job.wait() == [1]
    assert "this agent's heartbeat could not be started: can't start new thread" in job.output(0, 2)
    assert "Traceback" not in job.output(0, 2)


# -- while workers run --------------------------------------------------------------------------------


def test_stopped_store_process_is_continued(launch: Launch) -> None:
    job = launch(WAIT, nproc=1)
    job.await_worker("up.0.0")
    store = store_of(job.job.pids[0])
    os.kill(store.pid, signal.SIGSTOP)
    assert job.await_record(events.StoreProcessStopped).event.store_pid == store.pid
    (job.folder / "go").touch()
    assert job.wait() == [0]


def test_signal_stops_an_agent_whose_store_process_stays_silent(launch: Launch) -> None:
    job = launch(WAIT, nproc=1, UNRESUMED="yes")
    job.await_worker("up.0.0")
    worker = job.worker_pid(0)
    stop(store_of(job.job.pids[0]).pid)
    job.job.signal(0, signal.SIGINT)
    assert job.wait() == [128 + signal.SIGINT]
    assert not psutil.pid_exists(worker)
    (end,) = job.of(events.JobEnded)
    assert (end.event.outcome, end.event.exit_code) == ("preempted", 128 + signal.SIGINT)
    assert "did not answer for 10 s (after a signal to this agent)" in end.event.detail


def test_signal_is_known_to_other_threads_while_the_main_thread_waits_in_cpp() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    signals, store, known = Signals("SIGUSR1"), dist.HashStore(), []

    def interrupt() -> None:
        try:
            await_true(lambda: sys._current_frames()[threading.main_thread().ident or 0].f_lineno == get_line)
            os.kill(os.getpid(), signal.SIGUSR1)
            await_true(signals.has_arrived, 60.0)
            known.append(True)
        finally:
            store.set("key", "1")

    thread = threading.Thread(target=interrupt)
    try:
        get_line = sys._getframe().f_lineno + 2
        thread.start()
        store.get("key")
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.set_wakeup_fd(-1)
    assert known == [True]


USES_THE_STORE = """
import torch.distributed as dist
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
store.set(f"up/{rank}", "1")
say("up")
await_file(f"go.{cycle}")
if rank == 1:
    store.get(f"up/{rank}")
elif cycle == 0:
    await_file("never")
"""


@pytest.fixture
def lost(launch: Launch) -> tuple[Launched, int]:
    """Two agents. The second one hosts the workers' store, and its store process has been killed."""
    names: tuple[dict[str, str], ...] = ({"RESILIENCE_NODE": "node1"}, {"RESILIENCE_NODE": "node0"})
    job = launch(USES_THE_STORE, nodes="2", agents=2, nproc=1, conf=NO_NODE_IS_LOST, per_agent=names)
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    store = store_of(job.job.pids[1])
    store.kill()
    return job, store.pid


def test_loss_of_the_process_that_hosts_the_workers_store_is_recorded_and_made_good_at_once(
    lost: tuple[Launched, int],
) -> None:
    job, pid = lost
    record = job.await_record(events.StoreProcessLost)
    assert (record.event, record.origin.node) == (events.StoreProcessLost(pid, "SIGKILL", False, True), "node0")
    await_true(lambda: store_process(job.job.pids[1]) is not None)  # while the workers of the cycle still run
    for cycle in range(2):
        (job.folder / f"go.{cycle}").touch()
    assert job.wait() == [0, 0]
    assert len(job.of(events.StoreProcessLost)) == 1


def test_ranks_that_lost_their_store_with_its_process_are_not_blamed(lost: tuple[Launched, int]) -> None:
    job, _ = lost
    job.await_record(events.StoreProcessLost)
    for cycle in range(2):
        (job.folder / f"go.{cycle}").touch()
    assert job.wait() == [0, 0]
    condensed = report(load(job.account.folder))
    (incident,) = condensed.incidents
    assert (incident.verdict.what, incident.verdict.culprits, incident.status) == ("store_lost", (), "restarted")
    assert incident.verdict.candidates == ()
