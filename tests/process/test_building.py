"""A fault that strikes while process groups are being built, at any moment of it, strands nobody."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from resilience.facts import events
from resilience.facts.interruptions import Interruption
from tests.process.building import build_and_break
from tests.process.jobs import FAST
from tests.support.load import busy
from tests.support.ranks import Job

Start = Callable[..., Job]
WORLD_SIZE = 4
FAULTS = 30
BUILDING = {"_new_process_group_helper", "_create_process_group_wrapper", "_store_based_barrier"}  # gloo's construction
LATEST = 0.05  # seconds after the entry of an iteration: its groups are up long before


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fault_inside_group_building_strands_nobody(
    start: Start, seed: int, record_testsuite_property: Callable[[str, object], None]
) -> None:
    replaced = break_group_building(start, seed)
    record_testsuite_property(f"faults inside group building, seed {seed}", FAULTS)
    record_testsuite_property(f"of these ended by the ladder, seed {seed}", replaced)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 8))
def test_fault_inside_group_building_strands_nobody_on_a_busy_machine(start: Start, seed: int) -> None:
    with busy(8):
        break_group_building(start, seed)


def break_group_building(start: Start, seed: int) -> int:
    """Strike ranks at random moments while they build groups. Return how many the ladder ended, each rightly."""
    chance = random.Random(seed)
    plan = [(chance.randrange(WORLD_SIZE), chance.uniform(0.0005, LATEST)) for _ in range(FAULTS)]
    job = start(
        WORLD_SIZE,
        f"{build_and_break.__module__}:{build_and_break.__name__}",
        plan=plan,
        options=FAST | {"hard_timeout": 30.0},
    )
    ranks = job.wait(280)
    replaced = {number for number, rank in enumerate(ranks) if rank.signal is not None}
    # Who stays comes through every fault, and all through the same iterations.
    values = {rank.value for number, rank in enumerate(ranks) if number not in replaced}
    assert len(values) == 1, ranks
    assert values.pop() >= FAULTS
    # Whom the ladder ended slept in gloo's construction or in the wait for its rendezvous: it made no progress.
    assert {record.origin.initial_rank for record in job.of(events.RankSignalled)} == replaced
    for number in replaced:
        (stuck,) = job.of(events.AbortStuck, rank=number)
        assert stuck.event.where.split()[-1] in BUILDING
        assert Interruption.HARD_TIMEOUT in {told.interruption for told in job.interruptions() if told.rank == number}
        assert [record.event.result for record in job.of(events.RankStoodInFor, rank=number)] == ["excluded"]
    return len(replaced)
