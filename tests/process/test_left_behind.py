"""When a wrapped call is over, nothing of it is left in the process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.facts import events
from tests.support.ranks import LOOK_EVERY, Job

Start = Callable[..., Job]
JOBS = "tests.process.left_behind_jobs"
INSIDE_TORCH = {"resilience-drop", "resilience-time-out"}
ENDINGS = ["returns", "restarts", "raises", "leaves", "returns"]


@pytest.mark.parametrize("groups", [False, True], ids=["without groups", "with groups"])
def test_calls_leave_nothing_however_they_end_and_each_forks_its_monitor(start: Start, groups: bool) -> None:
    job = start(2, f"{JOBS}:call_several", endings=ENDINGS, groups=groups)
    ranks = job.wait()
    survivor = ["returned 0", "returned 1", "raised RestartAbort", "returned 1", "returned 0"]
    assert [rank.value[0] for rank in ranks] == [survivor, [*survivor[:3], "raised SystemExit", "returned 0"]]
    assert [rank.value[1] for rank in ranks] == [[{}] * len(ENDINGS)] * 2
    # At the moment after each call: only torch may still close or destroy groups of an earlier iteration (usage.md).
    at_once = [names for rank in ranks for names in rank.value[2]]
    assert len(at_once) == 2 * (1 + len(ENDINGS))
    assert {name for names in at_once for name in names} <= (INSIDE_TORCH if groups else set())
    assert [record.event.monitor for record in job.of(events.CallStarted)] == ["forked"] * 2 * (1 + len(ENDINGS))
    assert len({record.origin.job_id for record in job.of(events.CallStarted)}) == 1


def test_each_call_of_one_function_forks_its_monitor(start: Start) -> None:
    job = start(2, f"{JOBS}:call_again", calls=4)
    assert [rank.value for rank in job.wait()] == [[{}] * 3] * 2
    assert [record.event.monitor for record in job.of(events.CallStarted)] == ["forked"] * 2 * 4
    assert len(job.of(events.MonitorStarted)) == 2 * 4


@pytest.mark.parametrize(("initialised", "hook"), [(False, "excepthook"), (True, "_distributed_excepthook")])
def test_first_call_of_a_process_leaves_nothing_either(start: Start, initialised: bool, hook: str) -> None:
    """A hook that torch set when the program built groups of its own stays, though each restart takes it off."""
    (rank,) = start(1, f"{JOBS}:call_once", initialised=initialised).wait()
    assert rank.value == (hook, {})


@pytest.mark.parametrize("how", ["ignored", "reaped by a handler"])
def test_program_whose_children_cannot_be_waited_for_can_call_the_function(start: Start, how: str) -> None:
    job = start(1, f"{JOBS}:call_and_lose_children", how=how)
    (rank,) = job.wait()
    assert rank.value == (0, {})


def test_call_returns_its_value_if_too_many_files_are_open_to_wait_for_its_monitor(start: Start) -> None:
    (rank,) = start(1, f"{JOBS}:call_and_lose_sight_of_monitor").wait()
    assert rank.value == 7


@pytest.mark.parametrize(("ending", "got"), [("returns", "child"), ("raises", "raised in the child")])
def test_forked_child_that_leaves_the_function_says_nothing_as_its_parent(start: Start, ending: str, got: str) -> None:
    job = start(2, f"{JOBS}:fork_and_leave", ending=ending)
    ranks = [rank.value for rank in job.wait()]
    assert ranks == [("parent 0", f"{got}, RANK={rank}, 1 thread") for rank in range(2)]
    assert not job.of(events.RankInterrupted)
    assert [record.event.outcome for record in job.of(events.CallEnded)] == ["completed"] * 2
    assert len({record.origin.pid for record in job.records() if record.origin.role == "rank"}) == 2


def test_forked_child_that_leaves_a_hook_after_the_goodbye_does_not_speak_to_the_store(start: Start) -> None:
    (rank,) = start(1, f"{JOBS}:fork_after_the_goodbye").wait()
    assert rank.value == ("parent 0", "ValueError, spoke 0 times")


@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_call_interrupted_at_any_line_of_its_start_leaves_nothing(start: Start, stride: int) -> None:
    (rank,) = start(1, f"{JOBS}:call_interrupted_at_each_line_of_its_start", stride=stride).wait(limit=250)
    calls, left = rank.value
    assert left == []
    assert calls > 200 / stride


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_start_of_a_monitor_that_runs_out_of_descriptors_says_so_and_leaves_nothing(
    start: Start, is_forked: bool
) -> None:
    (rank,) = start(1, f"{JOBS}:calls_short_of_descriptors", is_forked=is_forked).wait()
    *failed, done = rank.value
    assert done == ("done", [])
    assert len(failed) > 5
    for ending, left in failed:
        assert ending.startswith("MonitorError: the monitor process could not be started: OSError: [Errno 24]"), ending
        assert "ulimit -n" in ending
        assert left == []


@pytest.mark.parametrize("has_begun", [True, False])
def test_page_of_a_call_interrupted_as_its_ticker_starts_is_closed_once_nothing_uses_it(
    start: Start, has_begun: bool
) -> None:
    (rank,) = start(1, f"{JOBS}:call_interrupted_as_its_ticker_starts", has_begun=has_begun).wait_ranks()
    assert rank.value == ("interrupted", [])


def test_call_interrupted_where_it_takes_signals_leaves_nothing(start: Start) -> None:
    (rank,) = start(1, f"{JOBS}:call_interrupted_where_it_takes_signals").wait()
    assert rank.value == ("interrupted", {})


@pytest.mark.parametrize(("owner", "name"), [("Session", "leave"), ("ProgramHandlers", "release")])
def test_call_interrupted_while_it_leaves_leaves_nothing(start: Start, owner: str, name: str) -> None:
    (rank,) = start(1, f"{JOBS}:call_interrupted_at_its_end_in", owner=owner, name=name).wait()
    assert rank.value == ("interrupted", {})


def test_rank_interrupted_twice_while_it_leaves_is_not_watched_any_more(start: Start) -> None:
    """A monitor that still took the rank for one that waits would end its process later."""
    first, second = start(2, f"{JOBS}:call_interrupted_twice_while_it_leaves").wait()
    assert (first.value, second.value) == (("done", 0), ("interrupted", 0))


def test_calls_leave_no_temporary_folder(start: Start, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    start(3, f"{JOBS}:call_often", temporary=str(temporary), calls=12).wait(limit=120)
    deadline = time.monotonic() + 60.0
    while left := list(temporary.iterdir()):  # the monitors of the last calls may still be ending
        assert time.monotonic() < deadline, left
        time.sleep(LOOK_EVERY)


def test_call_interrupted_at_its_end_does_not_keep_the_next_one_from_its_port(start: Start) -> None:
    (rank,) = start(1, f"{JOBS}:call_interrupted_at_its_end").wait()
    assert rank.value == ("interrupted", "done", [])


def test_rank_that_never_took_part_holds_up_no_other_by_its_terminate_hook(start: Start) -> None:
    first, second = start(2, f"{JOBS}:call_that_cannot_take_signals").wait()
    assert (first.value, second.value) == ("done", "ConfigurationError")


@pytest.mark.slow
def test_rank_that_has_left_and_calls_again_does_not_end_the_store_of_the_others(start: Start) -> None:
    first, *others = [rank.value for rank in start(3, f"{JOBS}:call_again_while_the_others_continue").wait()]
    assert "this rank left an earlier call, in which other ranks continue" in first
    assert others == ["completed 1"] * 2
