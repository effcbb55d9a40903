"""Code written for the compatible API behaves here as it does there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resilience.core import events
from tests.support.ranks import Job

Start = Callable[..., Job]
JOBS = "tests.process.compatible_jobs"


def test_what_finalize_and_health_check_return_is_ignored(start: Start) -> None:
    job = start(2, f"{JOBS}:return_anything_from_hooks")
    assert [rank.value for rank in job.wait()] == [1, 1]


def test_initialize_that_returns_none_keeps_the_state_and_warns_its_user(start: Start) -> None:
    job = start(2, f"{JOBS}:forget_the_state")
    for rank in job.wait():
        iteration, warned = rank.value
        assert iteration == 1
        assert len(warned) == 2 and all("UserWarning: the initialize hook" in line for line in warned)


@pytest.mark.parametrize(("has_cause", "cause"), [(False, "None"), (True, "OSError('the disk')")])
def test_rank_should_restart_raised_by_user_code_restarts_all(start: Start, has_cause: bool, cause: str) -> None:
    job = start(2, f"{JOBS}:ask_for_a_restart", has_cause=has_cause)
    assert [rank.value for rank in job.wait()] == [(1, ["None"]), (1, [cause])]
    assert {record.rank for record in job.interruptions(0)} == {1}


def test_exception_of_the_store_factory_reaches_the_caller_as_it_is(start: Start) -> None:
    job = start(2, f"{JOBS}:break_the_store_factory")
    for rank in job.wait_ranks():
        assert (rank.type, rank.error) == ("LookupError", "no store today")


def test_each_rank_logs_one_warning_for_each_restart(start: Start) -> None:
    job = start(2, f"{JOBS}:log_restarts", configured=True)
    for number, rank in enumerate(job.wait()):
        assert [(name, level) for name, level, _ in rank.value] == [("resilience", "WARNING")] * 2
        own = rank.value[number][2]
        assert f"iteration {number}: this rank failed: ValueError: broken in {number}" in own
        assert f"iteration {1 - number}: rank {1 - number} failed" in rank.value[1 - number][2]
    assert len(job.of(events.RestartEnded)) == 4


def test_restarts_are_silent_where_logging_is_not_configured(start: Start) -> None:
    job = start(2, f"{JOBS}:log_restarts", configured=False)
    job.wait()
    assert job.output() == ""
