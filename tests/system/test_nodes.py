"""Several nodes. Here a node is a group of ranks with a name, a local numbering and a leader of its own; all are on
one host, so what a network does between hosts is not part of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

import pytest

from resilience.facts import events
from resilience.facts.interruptions import Interruption
from tests.support.agreement import assert_agree, assert_one_first_interruption_for_each_incident
from tests.support.ranks import Job
from tests.support.stops import stop
from tests.system.jobs import RESULT

Start = Callable[..., Job]
PER_NODE = 2


def on_nodes(rank: int) -> Mapping[str, str]:
    return {"GROUP_RANK": str(rank // PER_NODE), "LOCAL_RANK": str(rank % PER_NODE), "LOCAL_WORLD_SIZE": str(PER_NODE)}


def start_and_hold(start: Start, nodes: int, **more: float) -> Job:
    world = nodes * PER_NODE
    job = start(world, "tests.system.jobs:train_and_hold", env_of=on_nodes, at="mid", step_held=5, **more)
    for rank in range(world):
        job.await_sign("mid", rank)
    return job


def lose_node(job: Job, node: int) -> list[int]:
    """Kill all of a node at once, so that nobody there tells of it: first all are stopped. Answers its ranks."""
    ranks = list(range(node * PER_NODE, (node + 1) * PER_NODE))
    pids = [*(job.monitor_pid(rank) for rank in ranks), *(job.pids[rank] for rank in ranks)]
    stop(*pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return ranks


def test_nodes_complete_together(start: Start) -> None:
    job = start_and_hold(start, nodes=2)
    job.let_on("mid")
    assert [rank.value for rank in job.wait()] == [RESULT] * 4
    assert {record.origin.node.rpartition("-")[2] for record in job.records()} == {"g0", "g1"}
    assert not job.of(events.RankInterrupted)


@pytest.mark.parametrize("nodes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_lost_node_is_noticed_by_another_and_its_ranks_excluded(start: Start, nodes: int) -> None:
    job = start_and_hold(start, nodes, node_lost_after=10.0)
    lost = lose_node(job, nodes - 1)
    job.let_on("mid")
    survivors = [rank for rank in range(nodes * PER_NODE) if rank not in lost]
    assert [rank.value for rank in job.wait_ranks() if rank.signal is None] == [RESULT] * len(survivors)
    silent = job.await_record(events.NodeFellSilent).event
    assert isinstance(silent, events.NodeFellSilent)
    assert silent.silent_node.endswith(f"-g{nodes - 1}")
    assert silent.silent_for_s >= silent.allowed_s
    for rank in lost:
        job.await_record(events.RankInterrupted, where=lambda event, rank=rank: event.record.rank == rank)
    told = {(record.rank, record.interruption) for record in job.interruptions() if record.rank in lost}
    assert told == {(rank, Interruption.UNRESPONSIVE) for rank in lost}


def test_deaths_on_two_nodes_at_once_are_one_first_interruption(start: Start) -> None:
    """Nobody is left on either node who could learn which of them came first."""
    job = start(
        3, "tests.system.jobs:train_and_hold", env_of=lambda rank: {"GROUP_RANK": str(rank)}, at="mid", step_held=5
    )
    for rank in range(3):
        job.await_sign("mid", rank)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for rank in (1, 2):
            job.signal(rank, number)
    job.let_on("mid")
    assert [rank.value for rank in job.wait()] == [RESULT, None, None]
    assert_one_first_interruption_for_each_incident(job.records())
    assert_agree(job.records())
