"""The compatible client and server among real processes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import queue
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from resilience.errors import ConfigurationError, MonitorError
from resilience.facts import events
from resilience.facts.configuration import Configuration
from resilience.facts.interruptions import Interruption
from resilience.facts.limits import Limits
from resilience.fault_tolerance import FaultToleranceConfig, RankMonitorServer, WorkloadAction, WorkloadControlRequest
from resilience.monitor import messages, rank_server
from resilience.monitor.config import to_limits
from resilience.system import processes
from resilience.system.channel import listen
from resilience.telemetry.durations import Header, Recorder
from tests.process.watched import Node, await_line, let_on, node
from tests.support.account import Account
from tests.support.ranks import free_port
from tests.support.server import ROOT

BEGIN = """
import json, time
from resilience.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest
client = RankMonitorClient()
client.init_workload_monitoring()
"""


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        yield made


def limits(**settings: Any) -> Limits:
    return to_limits(FaultToleranceConfig(**settings))


def found(node: Node) -> str:
    """The limit past which the one worker was found, once it is gone."""
    node.hear(messages.Gone)
    (record,) = node.records(events.RankFellSilent)
    return record.event.limit


# -- limits are enforced ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "settings", "limit"),
    [
        ("", {"initial_rank_heartbeat_timeout": 0.5}, "initial_heartbeat"),
        ("client.send_heartbeat()", {"rank_heartbeat_timeout": 0.5}, "heartbeat"),
        ("client.start_section('step')", {"rank_section_timeouts": {"step": 0.5}}, "section:step"),
        (
            "client.start_section('step'); client.start_section('data'); client.end_section('data')",
            {"rank_section_timeouts": {"step": 0.5, "data": 60.0}, "rank_out_of_section_timeout": 60.0},
            "section:step",
        ),
        (
            "client.start_section('step'); client.start_section('data'); client.end_all_sections()",
            {"rank_section_timeouts": {"step": 60.0, "data": 60.0}, "rank_out_of_section_timeout": 0.5},
            "out_of_section",
        ),
    ],
)
def test_silence_past_a_configured_limit_ends_the_rank(
    one: Node, code: str, settings: dict[str, Any], limit: str
) -> None:
    one.start(f"{BEGIN}{code}\ninput()", limits(**settings))
    assert found(one) == limit
    assert one.hear(messages.Gone).exit.signal == "SIGKILL"


def test_rank_that_took_its_leave_is_not_weighed_until_it_begins_again(one: Node) -> None:
    code = (
        "client.send_heartbeat(); client.start_section('step'); client.shutdown_workload_monitoring()\n"
        "time.sleep(1.5)\n"
        "print('left', flush=True); input()\n"
        "client.init_workload_monitoring(); client.start_section('step'); input()"
    )
    worker = one.start(
        BEGIN + code, limits(rank_heartbeat_timeout=1.0, rank_section_timeouts={"step": 1.0}, step_timeout=1.0)
    )
    assert await_line(worker) == "left"
    assert one.said(messages.Found) == []
    let_on(worker)
    assert found(one) == "section:step"


def test_rank_without_a_thread_left_goes_on_unwatched(one: Node) -> None:
    code = (
        "import threading, resilience\n"
        'def no_thread(thread): raise RuntimeError("can\'t start new thread")\n'
        "threading.Thread.start = no_thread\n"
        "resilience.step(0); resilience.heartbeat()\n"
        "from resilience.fault_tolerance import RankMonitorClient, RankMonitorClientError\n"
        "client = RankMonitorClient()\n"
        "try: client.init_workload_monitoring()\n"
        "except RankMonitorClientError as error: print(error, flush=True)"
    )
    worker = one.start(code, limits(rank_heartbeat_timeout=0.5))
    assert await_line(worker).endswith("no thread of this process can show its stacks: can't start new thread")
    assert one.hear(messages.Gone).exit.code == 0


def test_client_whose_link_another_one_has_closed_is_not_initialized_and_may_begin_again(one: Node) -> None:
    code = (
        "other = RankMonitorClient(); other.init_workload_monitoring(); other.shutdown_workload_monitoring()\n"
        "print(client.is_initialized, other.is_initialized, flush=True)\n"
        "try: client.calculate_and_set_hb_timeouts()\n"
        "except Exception as error: print(type(error).__name__, error, flush=True)\n"
        "client.init_workload_monitoring(); client.start_section('step'); input()"
    )
    worker = one.start(BEGIN + code, limits(rank_section_timeouts={"step": 0.5}))
    assert await_line(worker) == "False False"
    assert await_line(worker).startswith("RankMonitorClientError this client is not initialized")
    assert found(one) == "section:step"


def test_client_of_a_forked_child_is_not_initialized(one: Node) -> None:
    code = (
        "import os\n"
        "pid = os.fork()\n"
        "if not pid: os._exit(0 if not client.is_initialized else 3)\n"
        "print(os.waitpid(pid, 0)[1], client.is_initialized, flush=True)"
    )
    worker = one.start(BEGIN + code, limits())
    assert await_line(worker) == "0 True"


def test_calculated_limit_is_enforced(one: Node) -> None:
    code = (
        "for _ in range(3): client.send_heartbeat(); time.sleep(0.3)\n"
        "client.calculate_and_set_hb_timeouts()\n"
        "print(client.hb_timeouts.subsequent, flush=True); input()"
    )
    worker = one.start(BEGIN + code, limits(safety_factor=20.0))  # the limit holds before it is printed
    calculated = float(await_line(worker))
    assert found(one) == "heartbeat"
    (record,) = one.records(events.RankFellSilent)
    assert record.event.allowed_s == calculated < FaultToleranceConfig().rank_heartbeat_timeout


def recorded(runs: Path, name: str, began: float, first: float) -> None:
    """Write a run of 15,000 sections of 0.6 s, and of one before them of `first` seconds."""
    chance = random.Random(name)
    recorder = Recorder(runs / name, Header(name, "host", 0, 1, Configuration("train.py", world_size=1)), began)
    recorder.started("cold", began)
    recorder.add("train", first, began)
    for number in range(15_000):
        recorder.add("train", 0.6 * chance.lognormvariate(0.0, 0.02), began + first + 0.6 * number)
    recorder.close(began + first + 9_000.0)


@pytest.mark.parametrize("first", [0.6, 10.0])
def test_limit_fitted_in_a_job_leaves_a_slow_first_step_out_and_is_enforced(
    one: Node, tmp_path: Path, first: float
) -> None:
    """The first 16 occurrences have the limit of the compatible rule, 50 times the longest one here."""
    runs = tmp_path / "runs"
    recorded(runs, "yesterday", 0.0, first)
    recorded(runs, "today", 1e6, first)
    code = (
        "def spend(seconds): client.start_section('train'); time.sleep(seconds); client.end_section('train')\n"
        "for number in range(20): spend(0.01 if number else 0.3)\n"
        "client.calculate_and_set_section_timeouts(['train'], calc_out_of_section=False, method='fit')\n"
        "print(client.section_timeouts.section['train'], flush=True)\n"
        "client.start_section('train'); input()"
    )
    env = {"RESILIENCE_RUN_DIR": str(runs), "RESILIENCE_JOB_ID": "today"}
    worker = one.start(BEGIN + code, limits(safety_factor=50.0), **env)
    fitted = float(await_line(worker))
    assert 0.6 < fitted < 2.5 * 0.6
    assert found(one) == "section:train"
    (record,) = one.records(events.RankFellSilent)
    assert record.event.allowed_s == fitted


def test_rank_that_calculates_its_limits_does_not_wait_for_a_disk_that_does_not_answer(
    one: Node, tmp_path: Path
) -> None:
    """The disk's files are named pipes that nobody writes to: to open one takes for ever."""
    for run in ("yesterday", "today"):
        (tmp_path / "runs" / run / "timings").mkdir(parents=True)
        os.mkfifo(tmp_path / "runs" / run / "timings" / "host-0.hist")
    code = (
        "client.start_section('train'); time.sleep(0.01); client.end_section('train')\n"
        "client.calculate_and_set_section_timeouts(calc_out_of_section=False, method='fit')\n"
        "print(client.section_timeouts.section['train'], flush=True); input()"
    )
    env = {"RESILIENCE_RUN_DIR": str(tmp_path / "runs"), "RESILIENCE_JOB_ID": "today"}
    worker = one.start(BEGIN + code, limits(rank_out_of_section_timeout=30.0), **env)
    assert await_line(worker) == "1.0"  # of the compatible rule
    assert one.said(messages.Found) == []


def test_monitor_that_replaces_a_lost_one_enforces_a_calculated_limit_beside_many_others(one: Node) -> None:
    """The limits take more than half of a message."""
    code = (
        "client.start_section('step'); time.sleep(0.3); client.end_section('step')\n"
        "client.calculate_and_set_section_timeouts(['step'], calc_out_of_section=False)\n"
        "print(client.section_timeouts.section['step'], flush=True); input()\n"
        "client.start_section('step'); input()"
    )
    sections = {f"validation of data set number {number:03}": 600.0 for number in range(800)}
    worker = one.start(BEGIN + code, limits(rank_section_timeouts=sections))
    calculated = float(await_line(worker))
    one.hear(messages.Connected, where=lambda said: said.link.limits is not None)
    lost = one.monitors.pid(0)
    assert lost is not None
    os.kill(lost, signal.SIGKILL)
    one.wait_until(lambda: one.monitors.pid(0) != lost and one.monitors.is_monitored(0))
    let_on(worker)
    assert found(one) == "section:step"
    (record,) = one.records(events.RankFellSilent)
    assert record.event.allowed_s == calculated


def test_loaded_limit_is_enforced(one: Node) -> None:
    state = {"section_timeouts": {"section": {"step": 0.5}, "calculated_sections": ["step"]}}
    code = (
        "from resilience.fault_tolerance import RankMonitorClient\n"
        f"client = RankMonitorClient(); client.load_state_dict({state!r})\n"
        "client.init_workload_monitoring(); client.start_section('step'); input()"
    )
    one.start(code, limits(rank_section_timeouts={"step": 60.0}))
    assert found(one) == "section:step"


def test_request_reaches_the_agent(one: Node) -> None:
    worker = one.start(
        f"{BEGIN}client.send_workload_control_request("
        "WorkloadControlRequest(WorkloadAction.ExcludeThisNode, 'bad memory')); input()"
    )
    assert one.hear(messages.Requested) == messages.Requested("ExcludeThisNode", "bad memory", 0, worker.pid)


# -- ranks agree --------------------------------------------------------------------------------------

TOGETHER = (
    BEGIN
    + """
import os
import torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")

def spend(name, seconds):
    client.start_section(name); time.sleep(seconds); client.end_section(name)

assert client.calculate_and_set_hb_timeouts(skip_if_not_ready=True) is False
assert client.calculate_and_set_section_timeouts(skip_if_not_ready=True) is False
client.send_heartbeat()
for _ in range(2):
    spend("step", 0.4 if rank == 1 else 0.01)
    if rank == 0:
        spend("save", 0.3)
    client.send_heartbeat()
own = {name: taken * 1e-9 for name, taken in client._link.page.longest.items()}
assert client.calculate_and_set_hb_timeouts()
assert client.calculate_and_set_section_timeouts()
dist.destroy_process_group()
print(json.dumps([own, client.state_dict()]), flush=True)
input()
"""
)


def test_ranks_calculate_the_same_limits_from_what_any_of_them_saw(tmp_path: Path) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    with node(tmp_path, 2) as both:
        # The limits hold before they are printed.
        workers = [both.start(TOGETHER, limits(safety_factor=50.0), rank, RANK=str(rank), **env) for rank in (0, 1)]
        told = [json.loads(await_line(worker)) for worker in workers]
        (seen, state), (others, same) = told
        assert state == same
        section = state["section_timeouts"]["section"]
        assert set(others) == {"step"} and set(section) == {"save", "step"}
        assert section["step"] == pytest.approx(max(seen["step"], others["step"]) * 50.0) and others["step"] > 0.4
        assert section["save"] == pytest.approx(seen["save"] * 50.0)
        assert state["hb_timeouts"]["subsequent"] >= 0.4 * 50.0


# -- the server, without a launcher -------------------------------------------------------------------


@contextmanager
def pair(
    tmp_path: Path, code: str, count: int = 1, folder: str | None = "run", **settings: Any
) -> Iterator[tuple[RankMonitorServer, list[subprocess.Popen[str]]]]:
    """A monitor and workers that know nothing of each other but the path of the socket. folder: None for that of the
    process's job."""
    path, run = tmp_path / "monitor.sock", None if folder is None else tmp_path / folder
    server = RankMonitorServer.run_in_subprocess(FaultToleranceConfig(**settings), str(path), folder=run)
    workers: list[subprocess.Popen[str]] = []
    try:
        for rank in range(3, 3 + count):
            workers.append(started(path, code, rank))
        yield server, workers
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        server.close()
    assert not server.is_alive() and not path.exists()


def started(socket: Path, code: str, rank: int = 3) -> subprocess.Popen[str]:
    """Start a worker beside the monitor that listens there."""
    environment = {name: value for name, value in os.environ.items() if name != "RESILIENCE_MONITOR_SOCKET"}
    told = {"FT_RANK_MONITOR_IPC_SOCKET": str(socket), "RANK": str(rank), "WORLD_SIZE": "8"}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment | told,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_server_and_client_are_a_pair_without_further_calls(tmp_path: Path) -> None:
    hangs = f"{BEGIN}client.start_section('step'); input()"
    with pair(tmp_path, hangs, rank_section_timeouts={"step": 0.5}) as (server, (worker,)):
        assert worker.wait(60.0) == -signal.SIGKILL
        record = server.find(30.0)
        assert record is not None
        assert (record.interruption, record.rank, record.pid) == (Interruption.HARD_TIMEOUT, 3, worker.pid)
        assert server.is_alive()
        with pytest.raises(MonitorError, match="cannot be started"):
            RankMonitorServer.run_in_subprocess(
                FaultToleranceConfig(), str(tmp_path / "monitor.sock"), folder=tmp_path / "run"
            )
    silent = [
        record.event
        for record in Account(tmp_path / "run").records()
        if isinstance(record.event, events.RankFellSilent)
    ]
    assert [event.limit for event in silent] == ["section:step"]


def test_silence_without_a_set_limit_is_found_by_a_server_of_ones_own(tmp_path: Path) -> None:
    hangs = f"{BEGIN}client.send_heartbeat(); input()"
    with pair(tmp_path, hangs, detect_hangs=True, hang_first_limit=0.25) as (server, (worker,)):
        record = server.find(60.0)
        assert record is not None and record.detector is not None
        limit_s = 6 * 0.25  # before the second heartbeat
        assert (record.detector.name, record.detector.limit_s) == ("silence", limit_s)
        assert worker.wait(60.0) == -signal.SIGKILL


def test_request_reaches_a_launcher_of_ones_own(tmp_path: Path) -> None:
    asks = (
        f"{BEGIN}client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ExcludeThisNode, 'hot'))\n"
        "input()"
    )
    with pair(tmp_path, asks) as (server, (worker,)):
        request = server.receive_request(60.0)
        assert request == (3, WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "hot"))
        assert server.receive_request(0.0) is None
        worker.kill()
        record = server.find(60.0)
        assert record is not None and record.pid == worker.pid


def test_next_worker_is_watched_once_the_one_before_has_ended_or_has_taken_its_leave(tmp_path: Path) -> None:
    code = (
        f"{BEGIN}print('up', flush=True); input()\n"
        "client.shutdown_workload_monitoring(); print('left', flush=True); input()"
    )
    with pair(tmp_path, code, count=3) as (_, workers):
        lines: queue.Queue[tuple[int, str]] = queue.Queue()

        def read(number: int) -> None:
            for line in workers[number].stdout or ():
                lines.put((number, line.strip()))

        readers = [threading.Thread(target=read, args=(number,)) for number in range(3)]
        for reader in readers:
            reader.start()
        try:
            first, line = lines.get(timeout=60.0)
            assert line == "up"
            let_on(workers[first])
            assert lines.get(timeout=60.0) == (first, "left")
            second, line = lines.get(timeout=60.0)
            assert line == "up" and second != first
            workers[second].kill()
            third, line = lines.get(timeout=60.0)
            assert line == "up" and third not in (first, second)
        finally:
            for worker in workers:
                worker.kill()
            for reader in readers:
                reader.join()


@pytest.mark.slow
def test_monitor_keeps_no_thread_and_no_file_of_a_worker_that_took_its_leave_and_lives_on(tmp_path: Path) -> None:
    code = (
        f"{BEGIN}request = WorkloadControlRequest(WorkloadAction.ExcludeThisNode)\n"
        "client.send_workload_control_request(request); input()\n"
        "client.shutdown_workload_monitoring(); print('left', flush=True); input()"
    )
    with pair(tmp_path, code) as (server, workers):
        assert server.receive_request(60.0) is not None  # so the monitor has all files of this worker
        first_threads, first_files = threads(server), files(server)
        for _ in range(3):
            let_on(workers[-1])
            assert await_line(workers[-1]) == "left"
            workers.append(started(tmp_path / "monitor.sock", code))
            assert server.receive_request(60.0) is not None
        await_threads(server, first_threads)
        await_files(server, first_files + 3)  # of the monitor itself; each such worker kept four open


def test_client_may_take_its_leave_and_begin_again_at_once_and_keeps_nothing_of_before(tmp_path: Path) -> None:
    code = (
        f"{BEGIN}import os\nbefore = os.listdir('/proc/self/fd')\n"
        "for _ in range(100): client.shutdown_workload_monitoring(); client.init_workload_monitoring()\n"
        "print('more files:', len(os.listdir('/proc/self/fd')) - len(before), flush=True)\n"
        "client.start_section('step'); input()"
    )
    with pair(tmp_path, code, rank_section_timeouts={"step": 0.5}) as (server, (worker,)):
        assert await_line(worker) == "more files: 0"
        record = server.find(60.0)
        assert record is not None and record.pid == worker.pid
        assert worker.wait(60.0) == -signal.SIGKILL


def test_sigterm_ends_a_worker_that_checks_for_a_stop_if_none_is_decided(tmp_path: Path) -> None:
    looks = (
        f"{BEGIN}import resilience\nresilience.stop_requested(); print('up', flush=True)\nwhile True: time.sleep(0.05)"
    )
    with pair(tmp_path, looks) as (_, (worker,)):
        assert await_line(worker) == "up"
        worker.terminate()
        assert worker.wait(60.0) == -signal.SIGTERM


def test_server_ends_as_a_process_does_and_leaves_the_worker_alone(tmp_path: Path) -> None:
    code = f"{BEGIN}print('up', flush=True); input(); print('alive', flush=True)"
    with pair(tmp_path, code) as (server, (worker,)):
        assert await_line(worker) == "up"
        server.join(timeout=0.0)
        assert server.is_alive()
        server.terminate()
        assert not (tmp_path / "monitor.sock").exists()
        server.join()
        assert not server.is_alive()
        let_on(worker)
        assert await_line(worker) == "alive"


def test_records_of_a_server_belong_to_the_attempt_that_its_launcher_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"RESILIENCE_RUN_DIR": str(tmp_path / "runs"), "RESILIENCE_JOB_ID": "job", "RESILIENCE_ATTEMPT": "2"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pair(tmp_path, f"{BEGIN}client.end_all_sections()", folder=None) as (_, (worker,)):
        assert worker.wait(60.0) == 0
    records = Account(tmp_path / "runs" / "job@2").records()
    assert records and {record.origin.attempt for record in records} == {2}


# -- a whole training, as Megatron-LM calls the client ----------------------------------------------------

SECTIONS = ("setup", "step", "checkpointing")
TRAINING = """
import json, pathlib, time
from resilience.fault_tolerance import RankMonitorClient
checkpoint = pathlib.Path({checkpoint!r})
client = RankMonitorClient()
client.init_workload_monitoring(num_warmup_iters=2)
print(json.dumps([client.cfg.num_warmup_iterations, client.cfg.rank_section_timeouts]), flush=True)

def spend(section):
    client.start_section(section); time.sleep(0.05); client.end_section(section)
    client.send_heartbeat()
    time.sleep(0.05)  # outside sections

client.start_section("setup")
first = 0
if checkpoint.exists():
    saved = json.loads(checkpoint.read_text())
    client.load_state_dict(saved["limits"])
    first = saved["step"]
time.sleep(0.05)
client.end_section("setup")
print(json.dumps([first, client.state_dict()]), flush=True)
for step in range(first, first + 8):
    if step == 11:
        client.start_section("step"); time.sleep(3600)  # hangs
    spend("step")
    if step % 4 == 3:
        spend("checkpointing")
        client.calculate_and_set_section_timeouts(["setup", "step", "checkpointing"], calc_out_of_section=True)
        client.calculate_and_set_hb_timeouts()
        checkpoint.write_text(json.dumps({{"step": step + 1, "limits": client.state_dict()}}))
client.shutdown_workload_monitoring()
print("left", flush=True)
"""


def test_limits_of_a_training_are_calculated_in_one_process_and_end_a_hung_step_of_the_next(tmp_path: Path) -> None:
    configured = dict.fromkeys(SECTIONS, 600.0)
    saved = tmp_path / "checkpoint.json"
    training = TRAINING.format(checkpoint=str(saved))
    # A hundred times the longest: a busy machine may hold up a healthy step for seconds.
    with pair(tmp_path, training, rank_section_timeouts=configured, safety_factor=100.0) as (server, workers):
        (first,) = workers
        assert json.loads(await_line(first)) == [2, configured]
        step, state = json.loads(await_line(first))
        assert (step, state["section_timeouts"]["calculated_sections"]) == (0, [])
        assert (await_line(first), first.wait(60.0)) == ("left", 0)
        checkpoint = json.loads(saved.read_text())
        limits = checkpoint["limits"]
        assert set(limits["section_timeouts"]["calculated_sections"]) == set(SECTIONS)
        assert limits["section_timeouts"]["is_out_of_section_calculated"] and limits["hb_timeouts"]["were_calculated"]
        assert all(limit >= 5.0 for limit in limits["section_timeouts"]["section"].values())
        sections = limits["section_timeouts"]["section"]
        sections["step"] = min(sections["step"], 30.0)  # a step that was held up would make it minutes
        saved.write_text(json.dumps(checkpoint))
        second = started(tmp_path / "monitor.sock", training)
        workers.append(second)
        assert json.loads(await_line(second)) == [2, configured]
        assert json.loads(await_line(second)) == [8, limits]
        record = server.find(300.0)
        assert record is not None and (record.pid, record.interruption) == (second.pid, Interruption.HARD_TIMEOUT)
        assert second.wait(60.0) == -signal.SIGKILL
    silent = [
        (record.event.limit, record.event.allowed_s)
        for record in Account(tmp_path / "run").records()
        if isinstance(record.event, events.RankFellSilent)
    ]
    # The second process has saved no checkpoint, so its limits are those of the first.
    assert silent == [("section:step", pytest.approx(limits["section_timeouts"]["section"]["step"]))]


def take_descriptors(server: RankMonitorServer, folder: Path) -> None:
    """Let the monitor open no more files, once it watches a worker."""
    while not any(isinstance(record.event, events.MonitorStarted) for record in Account(folder).records()):
        time.sleep(0.01)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, hard))


def test_rank_that_leaves_a_monitor_without_a_descriptor_lives_on(tmp_path: Path) -> None:
    code = (
        f"{BEGIN}print('up', flush=True); input(); client.shutdown_workload_monitoring(); input()\n"
        "client.init_workload_monitoring(); client.start_section('step'); input()"
    )
    with pair(tmp_path, code, rank_section_timeouts={"step": 0.5}) as (server, (worker,)):
        assert await_line(worker) == "up"
        usual = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        take_descriptors(server, tmp_path / "run")
        before = threads(server)
        let_on(worker)
        await_threads(server, before - 1)  # one of them waited for the rank's death, which it seemed to see
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, usual)
        let_on(worker)
        record = server.find(60.0)
        assert record is not None and record.interruption is Interruption.HARD_TIMEOUT
        assert server.is_alive()


def threads(server: RankMonitorServer) -> int:
    state = processes.state(server.pid)
    assert state is not None
    return state.threads


def files(server: RankMonitorServer) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


def await_files(server: RankMonitorServer, most: int) -> None:
    deadline = time.monotonic() + 60.0
    while files(server) > most:
        assert time.monotonic() < deadline, f"the monitor has {files(server)} open files, expected {most} at most"
        time.sleep(0.01)


def await_threads(server: RankMonitorServer, number: int) -> None:
    deadline = time.monotonic() + 60.0
    while threads(server) != number:
        assert time.monotonic() < deadline, f"the monitor has {threads(server)} threads, expected {number}"
        time.sleep(0.01)


def test_monitor_without_a_descriptor_does_not_take_its_agent_for_dead_when_a_rank_dies(tmp_path: Path) -> None:
    with pair(tmp_path, f"{BEGIN}print('up', flush=True); input()") as (server, (worker,)):
        assert await_line(worker) == "up"
        usual = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        take_descriptors(server, tmp_path / "run")
        worker.kill()
        record = server.find(60.0)
        assert record is not None and record.interruption is Interruption.TERMINATED
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, usual)
        next_worker = started(tmp_path / "monitor.sock", f"{BEGIN}print('watched', flush=True)")
        assert next_worker.communicate(timeout=60.0)[0] == "watched\n"


SHOW_REFUSAL = "except Exception as error: print(str(error).rpartition(': ')[2], flush=True)"


def test_worker_gives_up_a_stopped_server_and_says_that_it_may_be_stopped(tmp_path: Path) -> None:
    path = tmp_path / "monitor.sock"
    server = RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(path), folder=tmp_path)
    os.kill(server.pid, signal.SIGSTOP)
    attach = "from resilience.fault_tolerance import RankMonitorClient as Client\n"
    attach += f"try: Client().init_workload_monitoring()\n{SHOW_REFUSAL}"
    worker = started(path, attach)
    assert worker.communicate(timeout=100.0)[0] == "is it stopped or overloaded, or out of descriptors?\n"
    os.kill(server.pid, signal.SIGCONT)
    server.close()


def test_worker_whose_turn_does_not_come_says_that_another_process_is_watched(tmp_path: Path) -> None:
    attach = "from resilience.monitor import connect\n"
    attach += f"try: connect.attach(limit=100.0, turn_limit=0.5)\n{SHOW_REFUSAL}"
    with pair(tmp_path, f"{BEGIN}print('up', flush=True); input()") as (_, (first,)):
        assert await_line(first) == "up"
        worker = started(tmp_path / "monitor.sock", attach)
        said = worker.communicate(timeout=100.0)[0]
    assert said == "it watches another process that has not ended; start a monitor for each rank\n"


def test_stopped_server_is_killed_after_it_was_told_to_end(tmp_path: Path) -> None:
    server = RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(tmp_path / "s"), folder=tmp_path)
    os.kill(server.pid, signal.SIGSTOP)
    server.terminate()
    server.join()
    assert not server.is_alive()


@pytest.mark.parametrize("failure", ["program", "setting"])
def test_server_that_cannot_be_started_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    path, config = tmp_path / "s", FaultToleranceConfig()
    if failure == "setting":
        config.rank_section_timeouts["step"] = -1
    with monkeypatch.context() as broken:
        if failure == "program":
            broken.setattr(sys, "executable", "/bin/true")
        with pytest.raises(MonitorError if failure == "program" else ConfigurationError):
            RankMonitorServer.run_in_subprocess(config, str(path), folder=tmp_path)
    assert not path.exists()
    RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(path), folder=tmp_path).close()


def test_server_takes_the_place_of_one_that_was_killed_with_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "s"
    owner = (
        "import os, sys; from resilience.fault_tolerance import FaultToleranceConfig, RankMonitorServer\n"
        "server = RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), *sys.argv[1:2], folder=sys.argv[2])\n"
        "os.kill(server.pid, 9); server.join(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", owner, str(path), str(tmp_path / "killed")], cwd=ROOT, timeout=120.0)
    assert path.is_socket()
    server = RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(path), folder=tmp_path / "run")
    worker = started(path, f"{BEGIN}print('watched', flush=True)")
    assert worker.communicate(timeout=120.0)[0] == "watched\n"
    server.close()


@pytest.mark.parametrize("is_file", [False, True])
def test_server_leaves_a_path_alone_that_is_in_use_and_says_what_to_do(tmp_path: Path, is_file: bool) -> None:
    path = tmp_path / "s"
    first = None
    if is_file:
        path.write_text("kept")
    else:
        first = RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(path), folder=tmp_path / "run")
    with pytest.raises(MonitorError, match="give each rank its own path, or remove the file"):
        RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(path), folder=tmp_path / "second")
    if first is None:
        assert path.read_text() == "kept"
    else:
        worker = started(path, f"{BEGIN}print('watched', flush=True)")
        assert worker.communicate(timeout=120.0)[0] == "watched\n"
        first.close()


def test_server_starts_where_the_file_system_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    server = RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(tmp_path / "s"), folder=tmp_path)
    assert server.is_alive()
    server.close()


def test_server_does_not_wait_for_ever_for_one_that_is_stopped_as_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_server, "LOCK_LIMIT", 0.1)
    with open(tmp_path / "s.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(MonitorError, match=r"another server has been starting there for 0.1 s: it holds .*s\.lock"):
            RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(tmp_path / "s"), folder=tmp_path)


def test_of_two_servers_that_start_at_a_left_over_path_one_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    listen(path).close()
    servers: list[RankMonitorServer] = []
    errors: list[MonitorError] = []
    to_check = rank_server.connect

    def start() -> None:
        try:
            servers.append(RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(path), folder=tmp_path))
        except MonitorError as error:
            errors.append(error)

    other = threading.Thread(target=start)

    def check(*arguments: Any) -> Any:
        try:
            return to_check(*arguments)
        finally:
            if other.ident is None:  # the first server has found the left-over socket
                other.start()
                other.join(1.0)  # it cannot start before the first one listens

    monkeypatch.setattr(rank_server, "connect", check)
    start()
    other.join()
    worker = started(path, f"{BEGIN}print('watched', flush=True)")
    assert worker.communicate(timeout=120.0)[0] == "watched\n"
    for server in servers:
        server.close()
    assert (len(servers), len(errors)) == (1, 1)
    assert not path.exists() and not Path(f"{path}.lock").exists()


def test_server_that_ends_leaves_the_socket_of_a_later_one_at_its_path_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(path), folder=tmp_path / "first")
    path.unlink()
    second = RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(path), folder=tmp_path / "second")
    first.close()
    worker = started(path, f"{BEGIN}print('watched', flush=True)")
    assert worker.communicate(timeout=120.0)[0] == "watched\n"
    second.close()


def test_monitor_of_a_killed_owner_leaves_the_socket_of_a_later_server_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    code = (
        "import sys; from resilience.fault_tolerance import FaultToleranceConfig, RankMonitorServer\n"
        "server = RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), *sys.argv[1:2], folder=sys.argv[2])\n"
        "print(server.pid, flush=True); input()"
    )
    arguments = [sys.executable, "-c", code, str(path), str(tmp_path / "killed")]
    owner = subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    monitor = processes.identity_of(int(await_line(owner)))
    path.unlink()
    server = RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(path), folder=tmp_path / "run")
    owner.kill()
    owner.communicate()
    assert processes.await_end(monitor, 60.0)
    worker = started(path, f"{BEGIN}print('watched', flush=True)")
    assert worker.communicate(timeout=120.0)[0] == "watched\n"
    server.close()


def test_server_that_is_killed_says_so(tmp_path: Path) -> None:
    server = RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(tmp_path / "s"), folder=tmp_path)
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(MonitorError, match="is gone"):
        server.find(30.0)
    server.close()
