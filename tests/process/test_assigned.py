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


@pytest.mark.parametrize(
    ("how", "failing", "at_entry", "ends"),
    [
        ("exits", [2], False, "SystemExit"),
        ("exits", [0, 2], True, "SystemExit"),
        ("is killed", [2], False, ""),
        ("is killed and forks", [2], False, ""),
    ],
)
def test_assignment_that_exits_on_some_ranks_costs_only_these(
    start: Start, how: str, failing: list[int], at_entry: bool, ends: str
) -> None:
    """is killed: the rank's monitor, which stands in for it, exits in the hook, or forks a child that raises there."""
    job = start(4, TARGET, ranks=failing, at_entry=at_entry, how=how)
    ranks = job.wait_ranks(180.0)
    healthy = [rank for rank in range(4) if rank not in failing]
    assert [ranks[rank].type for rank in failing] == [ends] * len(failing)
    assert {ranks[rank].value[1:] for rank in healthy} == {(place, len(healthy)) for place in range(len(healthy))}
    assert job.of(events.StoreLost) == []


@pytest.mark.parametrize("at_entry", [False, True])
@pytest.mark.parametrize("is_in_filter", [False, True])
def test_rank_that_raises_in_an_assignment_in_which_ranks_meet_costs_itself_alone(
    start: Start, is_in_filter: bool, at_entry: bool
) -> None:
    """The filters wait 60 s for a rank that does not come."""
    target = "tests.process.assigned:raises_before_a_filter"
    ranks = start(4, target, is_in_filter=is_in_filter, at_entry=at_entry).wait(180.0)
    assert ranks[1].type == "KeyError", ranks[1]
    assert {ranks[rank].value[1:] for rank in (0, 2, 3)} == {(0, 3), (1, 3), (2, 3)}, ranks


def test_forked_child_that_leaves_an_assignment_says_nothing_as_its_parent(start: Start) -> None:
    job = start(2, TARGET, ranks=[0], at_entry=False, how="forks")
    assert [rank.value for rank in job.wait(180.0)] == [(1, 0, 2), (1, 1, 2)]
    job.await_sign_file(job.folder / "child")
    assert (job.folder / "child").read_text() == "KeyError('no such rack'), 1 thread"


@pytest.mark.parametrize("where", ["module", "path", "script"])
def test_monitor_that_is_a_fresh_process_has_hooks_of_modules_beside_the_script(start: Start, where: str) -> None:
    (rank,) = start(1, "tests.process.assigned:beside_a_thread", where=where).wait_ranks(120.0)
    if where == "module":
        assert rank.value == 1
    else:
        assert rank.type == "ConfigurationError"
        place = "hooks_beside_the_script, which no `import` would find" if where == "path" else "the script itself"
        assert f"Mine is defined in {place}" in rank.error


def test_call_that_is_refused_on_one_rank_does_not_count(start: Start) -> None:
    job = start(2, "tests.process.assigned:is_refused_first")
    assert [rank.value for rank in job.wait(120.0)] == [7, 7]


def test_assignment_that_raises_on_every_rank_ends_the_job_with_its_error(start: Start) -> None:
    job = start(2, TARGET, ranks=[0, 1], at_entry=False)
    assert [rank.type for rank in job.wait(180.0)] == ["KeyError"] * 2
