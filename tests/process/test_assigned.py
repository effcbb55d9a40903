"""A rank assignment that raises on some ranks costs these ranks, and no other one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resilience.facts import events
from tests.support.ranks import Job

Start = Callable[..., Job]
TARGET = "tests.process.assigned:fails_on"


@pytest.mark.parametrize("at_entry", [False, True])
@pytest.mark.parametrize("failing", [[2], [0, 2]])
def test_assignment_that_raises_on_some_ranks_costs_only_these(
    start: Start, failing: list[int], at_entry: bool
) -> None:
    job = start(4, TARGET, ranks=failing, at_entry=at_entry)
    ranks = job.wait(180.0)
    healthy = [rank for rank in range(4) if rank not in failing]
    ended = {rank: (ranks[rank].value, ranks[rank].type, ranks[rank].error) for rank in range(4)}
    for rank in failing:
        assert ranks[rank].type == "KeyError" and "no such rack" in ranks[rank].error, ended
    assert {ranks[rank].value[1:] for rank in healthy} == {(place, len(healthy)) for place in range(len(healthy))}, (
        ended
    )
    assert {record.event.result for record in job.of(events.RankStoodInFor)} <= {"excluded"}


def test_assignment_that_raises_on_every_rank_ends_the_job_with_its_error(start: Start) -> None:
    job = start(2, TARGET, ranks=[0, 1], at_entry=False)
    assert [rank.type for rank in job.wait(180.0)] == ["KeyError"] * 2
