"""A fault that strikes while process groups are being built, at any moment of it, strands nobody."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from resilience.facts import events
from tests.process.building import build_and_break
from tests.process.jobs import FAST
from tests.support.load import busy
from tests.support.ranks import Job

Start = Callable[..., Job]
Note = Callable[[str, object], None]
WORLD_SIZE = 4
FAULTS = 30
LATEST = 0.05  # seconds after the entry of an iteration: its groups are up long before


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fault_inside_group_building_strands_nobody(start: Start, seed: int, note: Note) -> None:
    break_group_building(start, seed, note)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3, 8))
def test_fault_inside_group_building_strands_nobody_on_a_busy_machine(start: Start, seed: int, note: Note) -> None:
    with busy(8):
        break_group_building(start, seed, note)


@pytest.fixture
def note(record_testsuite_property: Note) -> Note:
    return record_testsuite_property


def break_group_building(start: Start, seed: int, note: Note) -> None:
    """Strike ranks at random moments while they build groups. No rank may be ended for that, whatever the load."""
    chance = random.Random(seed)
    plan = [(chance.randrange(WORLD_SIZE), chance.uniform(0.0005, LATEST)) for _ in range(FAULTS)]
    job = start(
        WORLD_SIZE,
        f"{build_and_break.__module__}:{build_and_break.__name__}",
        plan=plan,
        options=FAST | {"hard_timeout": 30.0},
    )
    ranks = job.wait(280)
    why = {number: why_ended(job, number) for number, rank in enumerate(ranks) if rank.signal is not None}
    note(f"faults inside group building, seed {seed}", FAULTS)
    note(f"of these that ended a rank, seed {seed}", len(why))
    assert not job.of(events.AbortStuck)
    assert not job.of(events.RankSignalled), why
    assert not why, ranks
    # All came through every fault, and through the same iterations.
    values = {rank.value for rank in ranks}
    assert len(values) == 1, ranks
    assert values.pop() >= FAULTS


def why_ended(job: Job, rank: int) -> list[str]:
    """Return the records that tell why a rank was ended, and where it was. "abort" is the short limit: the rank slept
    in a place that nothing frees, so load does not explain it."""
    signalled = [f"{each.event.signals}: {each.event.reason}" for each in job.of(events.RankSignalled, rank)]  # type: ignore[attr-defined]
    return signalled + [f"stuck in {each.event.where}" for each in job.of(events.AbortStuck, rank)]  # type: ignore[attr-defined]
