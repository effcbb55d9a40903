"""Monitors and the store's host die or stall; no healthy rank is taken along, and nothing hangs."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from resilience.core.peer_liveness import COUNT_KEY
from resilience.facts import events
from resilience.facts.interruptions import Interruption
from resilience.inprocess._runtime.supervision import BEATS, alone_key
from resilience.system import processes
from tests.process.jobs import FAST, RESULT
from tests.support.ranks import Job, free_port
from tests.support.stops import stop

Start = Callable[..., Job]
TRAIN = "tests.process.jobs:train"
WAIT_FOR_SIGN = "tests.process.jobs:wait_for_sign"


def test_rank_whose_monitor_is_killed_goes_on_and_says_so(start: Start) -> None:  # F24
    job = start(2, WAIT_FOR_SIGN)
    monitor = job.await_record(events.MonitorStarted, rank=1).origin.pid
    job.await_record(events.StageStarted, rank=1, where=lambda event: event.stage == "run")
    os.kill(monitor, signal.SIGKILL)
    job.await_record(events.MonitorLost, rank=1, role="rank")
    (job.folder / "go").touch()
    assert [rank.value for rank in job.wait_ranks()] == [0, 0]  # the function was started once
    lost = [record for record in job.interruptions() if record.rank == 1]
    assert [record.interruption for record in lost] == [Interruption.MONITOR_PROCESS_EXCEPTION]
    assert any(record.event.outcome == "completed" for record in job.of(events.IterationEnded, rank=1))


def test_job_that_is_suspended_for_longer_than_its_limits_goes_on(start: Start) -> None:
    limits = {"soft_timeout": 8.0, "hard_timeout": 16.0, "progress_watchdog_interval": 0.25}
    job = start(2, WAIT_FOR_SIGN, options=limits)
    for rank in range(2):
        job.await_record(events.StageStarted, rank=rank, where=lambda event: event.stage == "run")
    monitors = [job.monitor_pid(rank) for rank in range(2)]
    stop(*monitors, *job.pids)
    time.sleep(24.0)  # as `scontrol suspend` does it
    for pids in (monitors, job.pids):  # the monitors see ranks that have shown nothing for long
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)
    (job.folder / "go").touch()
    assert [rank.value for rank in job.wait()] == [0, 0]
    assert job.of(events.RankFellSilent) == job.of(events.RankSignalled) == []


def test_stopped_monitor_does_not_disturb_its_rank(start: Start) -> None:  # F25
    job = start(2, WAIT_FOR_SIGN)
    monitor = job.await_record(events.MonitorStarted, rank=1).origin.pid
    job.await_record(events.StageStarted, rank=1, where=lambda event: event.stage == "run")
    stop(monitor)
    try:
        (job.folder / "go").touch()
        assert [rank.value for rank in job.wait_ranks()] == [0, 0]
    finally:
        os.kill(monitor, signal.SIGCONT)
    assert not job.of(events.RankInterrupted)


def test_stopped_monitor_of_a_node_does_not_make_the_node_look_lost(start: Start) -> None:
    port, limits = free_port(), {"heartbeat_timeout": 8.0, "monitor_process_interval": 0.1}
    job = start(
        4,
        WAIT_FOR_SIGN,
        options=limits,
        env={"MASTER_PORT": str(port)},
        env_of=lambda rank: {"RESILIENCE_NODE": f"node{rank // 2}"},
    )
    for rank in range(4):
        job.await_record(events.StageStarted, rank=rank, where=lambda event: event.stage == "run")
    tcp_store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    store = dist.PrefixStore("resilience/none/0/0/", tcp_store)
    beats = f"nodes/node0@{processes.pid_namespace()}/beat"
    for rank in (2, 3):  # one of them leads node1, and node0 watches it
        monitor = job.monitor_pid(rank)
        stop(monitor)
        try:
            until, late = store.add(beats, 0) + 3 * BEATS // 2, time.monotonic() + 120  # 1.5 times heartbeat_timeout
            while store.add(beats, 0) < until:
                assert time.monotonic() < late, f"node0's counter {beats} stands still"
                time.sleep(0.05)
        finally:
            os.kill(monitor, signal.SIGCONT)
    del store, tcp_store
    (job.folder / "go").touch()
    assert [rank.value for rank in job.wait()] == [0] * 4
    assert not job.of(events.NodeFellSilent) and not job.of(events.RankInterrupted)


def store_of(job: Job, port: int) -> dist.Store:
    """Connect to the store of a call's keys."""
    return dist.PrefixStore("resilience/none/0/0/", dist.TCPStore("127.0.0.1", port, wait_for_workers=False))


def start_on_nodes(
    start: Start, world_size: int, target: str = WAIT_FOR_SIGN, **more: object
) -> tuple[Job, dist.Store]:
    """Start ranks that each are alone on a node. Return the job, and its store once each has entered its function."""
    port = free_port()
    job = start(
        world_size,
        target,
        env={"MASTER_PORT": str(port)},
        env_of=lambda rank: {"RESILIENCE_NODE": f"node{rank}"},
        **more,
    )
    for rank in range(world_size):
        job.await_record(events.StageStarted, rank=rank, where=lambda event: event.stage == "run")
    return job, store_of(job, port)


def ring_of(store: dist.Store) -> list[int]:
    """Return the nodes by their places in the ring. A place stays empty if two processes took one at the same time."""
    places = range(1, store.add(COUNT_KEY, 0) + 1)
    names = [store.get(key).decode() for key in map("nodes/name/{}".format, places) if store.check([key])]
    return [int(name.partition("@")[0].removeprefix("node")) for name in names]


def await_beats(store: dist.Store, key: str, timeouts: float) -> None:
    """Wait until a counter has risen for some times heartbeat_timeout."""
    until, late = store.add(key, 0) + timeouts * BEATS, time.monotonic() + 120
    while store.add(key, 0) < until:
        assert time.monotonic() < late, f"{key} stands still"
        time.sleep(0.05)


def lose(job: Job, *ranks: int) -> None:
    """Kill ranks and their monitors at once."""
    monitors = [job.monitor_pid(rank) for rank in ranks]
    stop(*monitors)
    for monitor in monitors:
        os.kill(monitor, signal.SIGKILL)
    for rank in ranks:
        job.signal(rank, signal.SIGKILL)


@pytest.mark.parametrize("how", ["at once", pytest.param("one after another", marks=pytest.mark.slow)])
def test_lost_nodes_that_are_neighbours_are_all_excluded(start: Start, how: str) -> None:
    job, store = start_on_nodes(start, 3, options={"heartbeat_timeout": 4.0, "monitor_process_interval": 0.1})
    ring = ring_of(store)
    first = ring[ring.index(0) - 2]  # node 0 watches it, and it watches the other one
    second = 3 - first
    if how == "at once":
        lose(job, first, second)
    else:
        lose(job, first)
        job.await_record(events.RankStoodInFor, rank=0, where=lambda event: event.initial_rank == first)
        lose(job, second)
    for rank in (first, second):
        record = job.await_record(
            events.RankStoodInFor, rank=0, where=lambda event, rank=rank: event.initial_rank == rank
        )
        assert record.event.result == "excluded"
    del store
    (job.folder / "go").touch()
    assert job.wait_ranks()[0].value == (1 if how == "at once" else 2)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_rank_whose_nodes_only_monitor_is_lost_goes_on(start: Start, number: int) -> None:
    job, store = start_on_nodes(start, 2, options={"heartbeat_timeout": 3.0, "monitor_process_interval": 0.1})
    monitor = job.monitor_pid(1)
    try:
        stop(monitor) if number == signal.SIGSTOP else os.kill(monitor, number)
        await_beats(store, f"nodes/node0@{processes.pid_namespace()}/beat", 2.5)  # node 0 watches node 1
        del store
        (job.folder / "go").touch()
        assert [rank.value for rank in job.wait_ranks()] == [0, 0]
    finally:
        if number == signal.SIGSTOP:
            os.kill(monitor, signal.SIGCONT)
    assert not job.of(events.NodeFellSilent)


@pytest.mark.parametrize("when", ["start", pytest.param("round", marks=pytest.mark.slow)])
def test_rank_whose_nodes_only_monitor_does_not_supervise_goes_on(start: Start, when: str) -> None:
    job, store = start_on_nodes(start, 2, "tests.process.hosted:monitor_does_not_supervise", when=when)
    failed = job.await_record(events.HookFailed, rank=1, role="monitor").event
    assert (failed.hook, "can't start new thread" in failed.error) == (
        {"start": "monitor", "round": "supervision"}[when],
        True,
    )
    await_beats(store, f"nodes/node0@{processes.pid_namespace()}/beat", 2.5)  # node 0 watches node 1
    del store
    (job.folder / "go").touch()
    assert [rank.value for rank in job.wait()] == [0, 0]
    assert not job.of(events.NodeFellSilent)


def test_rank_that_leaves_beside_its_stopped_monitor_is_not_taken_for_dead(start: Start) -> None:
    job, store = start_on_nodes(start, 2, "tests.process.jobs:leave_early", how="completes", heartbeat=3.0)
    for rank in range(2):
        job.await_sign("first", rank)
    monitor = job.monitor_pid(1)
    stop(monitor)
    try:
        job.let_on("first")
        assert job.wait_rank(1).value == 0
        job.await_sign("last", 0)
        await_beats(store, f"nodes/node0@{processes.pid_namespace()}/beat", 2.5)  # node 0 watches node 1
    finally:
        os.kill(monitor, signal.SIGCONT)
    del store
    job.let_on("last")
    assert job.wait()[0].value == 0
    assert not job.of(events.NodeFellSilent)


def test_rank_that_dies_after_its_nodes_only_monitor_is_excluded(start: Start) -> None:
    job, store = start_on_nodes(start, 2, options={"heartbeat_timeout": 3.0, "monitor_process_interval": 0.1})
    os.kill(job.monitor_pid(1), signal.SIGKILL)
    await_beats(store, alone_key(1), 1.5)
    job.signal(1, signal.SIGKILL)
    record = job.await_record(events.RankStoodInFor, rank=0, where=lambda event: event.initial_rank == 1)
    assert record.event.result == "excluded"
    del store
    (job.folder / "go").touch()
    assert job.wait_ranks()[0].value == 1


def test_rank_that_dies_together_with_its_monitor_is_excluded_by_its_neighbour(start: Start) -> None:  # F24
    job = start(2, WAIT_FOR_SIGN, options={"heartbeat_timeout": 2.0})
    monitor = job.await_record(events.MonitorStarted, rank=1).origin.pid
    job.await_record(events.StageStarted, rank=1, where=lambda event: event.stage == "run")
    os.kill(monitor, signal.SIGKILL)
    job.signal(1, signal.SIGKILL)
    record = job.await_record(events.RankStoodInFor, rank=0, where=lambda event: event.initial_rank == 1)
    assert record.event.result == "excluded"
    (job.folder / "go").touch()
    assert job.wait_ranks()[0].value == 1  # started again without rank 1


@pytest.mark.parametrize("how", ["completes", "in its hook", "leaves"])
def test_rank_that_ends_well_after_it_lost_its_monitor_is_not_taken_for_dead(start: Start, how: str) -> None:
    """Rank 2 really dies with its monitor. Who records that has looked at rank 1 before, or in the same round."""
    job = start(3, "tests.process.jobs:leave_early", how=how)
    for rank in range(3):
        job.await_sign("first", rank)
    if how == "in its hook":
        job.let_on("first")
        job.await_sign("hook", 1)
    os.kill(job.monitor_pid(1), signal.SIGKILL)
    job.await_record(events.MonitorLost, rank=1, role="rank")
    job.let_on("hook" if how == "in its hook" else "first")
    assert job.wait_rank(1) is not None, job.output()
    for rank in (0, 2):
        job.await_sign("last", rank)
    os.kill(job.monitor_pid(2), signal.SIGKILL)
    job.signal(2, signal.SIGKILL)
    dead = 2, Interruption.TERMINATED
    job.await_record(events.RankInterrupted, where=lambda event: (event.record.rank, event.record.interruption) == dead)
    job.let_on("last")
    assert job.wait_rank(0) is not None, job.output()
    job.await_record(events.MonitorEnded, rank=0, role="monitor")
    assert [record.rank for record in job.interruptions() if record.interruption == Interruption.TERMINATED] == [2]


def test_store_host_ends_although_a_child_of_a_killed_rank_keeps_its_connections(start: Start) -> None:
    job = start(3, "tests.process.jobs:wait_with_a_child", options={"heartbeat_timeout": 2.0})
    job.await_sign_file(job.folder / "child")
    child = int((job.folder / "child").read_text())
    try:
        os.kill(job.monitor_pid(1), signal.SIGKILL)
        for rank in (1, 0):
            job.signal(rank, signal.SIGKILL)
            job.await_record(events.InterruptionArrived, where=lambda event, rank=rank: event.initial_rank == rank)
        (job.folder / "go").touch()
        assert job.wait_ranks()[2].value in (1, 2)  # one restart or two
        job.await_record(events.MonitorEnded, rank=0, role="monitor", limit=30.0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_store_stays_longer_than_the_barriers_limit_when_the_rank_beside_it_has_left(start: Start) -> None:
    limits = {"soft_timeout": 6.0, "hard_timeout": 7.0, "heartbeat_timeout": 6.0, "barrier_timeout": 8.0}
    faults = [{"kind": "exit_3", "rank": 0, "iteration": 0, "step": 5}]
    faults += [{"kind": "half_a_second", "rank": 1, "iteration": 1, "step": step} for step in range(20)]
    faults += [{"kind": "exception", "rank": 1, "iteration": 1, "step": 20}]  # its restart needs the store
    job = start(3, TRAIN, faults=faults, options=limits, steps=24)
    ended = job.wait()
    assert ended[0].code == 3
    assert [rank.value for rank in ended[1:]] == [24.0, 24.0]


def test_loss_of_the_store_ends_every_rank_with_a_clear_error(start: Start) -> None:  # F23
    options = FAST | {"heartbeat_timeout": 2.0, "barrier_timeout": 20.0}
    job = start(2, WAIT_FOR_SIGN, options=options)
    host = job.await_record(events.MonitorStarted, rank=0).origin.pid
    for rank in (0, 1):
        job.await_record(events.StageStarted, rank=rank, where=lambda event: event.stage == "run")
    os.kill(host, signal.SIGKILL)
    ranks = job.wait_ranks()
    assert {rank.type for rank in ranks} == {"StoreError"}
    assert all("gone or unreachable" in rank.error for rank in ranks)


def test_process_with_threads_gets_an_executed_monitor_and_is_told_why(start: Start) -> None:
    job = start(2, "tests.process.jobs:train_beside_a_thread")
    assert [rank.value for rank in job.wait()] == [RESULT] * 2
    call = job.of(events.CallStarted, rank=0)[0].event
    assert (call.monitor, "other threads: user-thread" in call.monitor_reason) == ("executed", True)
    assert Interruption.EXCEPTION in job.kinds(0)[1]


def test_monitor_that_runs_only_after_its_rank_has_died_records_and_represents_it(start: Start) -> None:
    job = start(2, "tests.process.jobs:die_before_the_monitor_runs")
    assert [rank.value for rank in job.wait()] == ["done", None]
    job.await_record(events.MonitorEnded, rank=1)
    (exited,) = job.of(events.RankExited, rank=1)
    assert not exited.event.goodbye
    assert [record.interruption for record in job.interruptions() if record.rank == 1] == [Interruption.TERMINATED]


def test_monitor_whose_first_connection_fails_connects_again(start: Start) -> None:
    job = start(2, "tests.process.hosted:monitor_connects_late", fails=1)
    job.await_sign("entered", 1)
    job.signal(1, signal.SIGKILL)
    record = job.await_record(events.RankStoodInFor, rank=1, role="monitor")
    assert (record.event.initial_rank, record.event.result) == (1, "excluded")
    job.let_on("train")
    assert job.wait()[0].value == 1


def test_rank_whose_monitor_never_connects_goes_on_and_says_so(start: Start) -> None:
    job, store = start_on_nodes(
        start, 2, "tests.process.hosted:monitor_connects_late", fails=1000, first_limit=1.0, heartbeat=3.0
    )
    failed = job.await_record(events.HookFailed, rank=1, role="monitor").event
    assert (failed.hook, "connection reset by peer" in failed.error) == ("monitor", True)
    await_beats(store, f"nodes/node0@{processes.pid_namespace()}/beat", 2.5)  # node 0 watches node 1
    del store
    job.let_on("train")
    assert [rank.value for rank in job.wait()] == [0, 0]
    assert not job.of(events.NodeFellSilent)


def test_rank_whose_monitor_neither_connects_nor_fails_goes_on_and_says_so(start: Start) -> None:
    job, store = start_on_nodes(
        start, 2, "tests.process.hosted:monitor_connects_late", is_held=True, heartbeat=3.0, barrier=20.0
    )
    await_beats(store, alone_key(1), 1.5)
    failed = job.await_record(events.HookFailed, rank=1, role="rank").event
    assert failed == events.HookFailed("monitor", "it was not connected to the store within 10 s")
    job.let_on("connects")
    del store
    job.let_on("train")
    assert [rank.value for rank in job.wait()] == [0, 0]
    assert not job.of(events.NodeFellSilent)


def test_node_is_not_looked_for_before_its_monitor_has_connected(start: Start) -> None:
    port, limit = free_port(), 3.0
    job = start(
        2,
        "tests.process.hosted:monitor_connects_late",
        env={"MASTER_PORT": str(port)},
        env_of=lambda rank: {"RESILIENCE_NODE": f"node{rank}"},
        is_held=True,
        heartbeat=limit,
    )
    job.await_sign("connects", 1)
    job.monitor_pid(0)
    store = store_of(job, port)
    await_beats(store, f"nodes/node0@{processes.pid_namespace()}/beat", 2.5)
    del store
    job.let_on("connects")
    job.let_on("train")
    assert [rank.value for rank in job.wait()] == [0, 0]
    assert not job.of(events.NodeFellSilent)


def test_hook_that_an_executed_monitor_cannot_get_is_refused_clearly(start: Start) -> None:
    job = start(1, "tests.process.jobs:train_beside_a_thread", hooks={"groups_of": 1})
    (rank,) = job.wait_ranks()
    assert rank.type == "ConfigurationError"
    assert "rank_assignment" in rank.error


def test_port_in_use_is_a_clear_error(start: Start) -> None:  # F41
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        job = start(1, TRAIN, env={"MASTER_PORT": port})
        (rank,) = job.wait_ranks()
    assert rank.type == "StoreError"
    assert port in rank.error
    assert "Address already in use" in rank.error
