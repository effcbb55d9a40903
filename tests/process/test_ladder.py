"""The abort's short limit ends only a rank that nothing else frees; every other rank gets until hard_timeout."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resilience.facts import events
from resilience.facts.interruptions import Interruption
from tests.process import laddering
from tests.support.ranks import Job

Start = Callable[..., Job]
SHORT = {"RESILIENCE_ABORT_LIMIT": "0.5"}


def target(function: Callable[..., object]) -> str:
    return f"{laddering.__name__}:{function.__name__}"


def test_rank_that_writes_a_checkpoint_for_longer_than_the_abort_limit_lives(start: Start) -> None:
    job = start(2, target(laddering.save_on_a_slow_disk), env=SHORT)
    job.await_sign("waits", rank=0)
    job.let_on("ready")
    delayed = job.await_record(events.AbortDelayed, rank=0).event
    job.let_on("written")
    assert [rank.value for rank in job.wait()] == [1, 1]
    assert delayed.where.endswith("_write_files_from_queue")
    assert not job.of(events.AbortStuck)
    assert not job.of(events.RankSignalled)


def test_rank_that_waits_in_its_own_file_store_lives_and_the_account_says_for_what(start: Start) -> None:
    job = start(2, target(laddering.wait_for_a_file_store), limits={}, group_timeout=15.0, env=SHORT)
    job.await_sign("waits", rank=0)
    job.await_sign("ready", rank=1)
    job.let_on("ready")
    delayed = job.await_record(events.AbortDelayed, rank=0).event
    assert (delayed.store, delayed.limit_s) == ("FileStore", 0.5)
    assert delayed.where.endswith("_new_process_group_helper")
    assert [rank.value for rank in job.wait()] == [1, 1]  # gloo's own timeout came first
    assert not job.of(events.RankSignalled)


def test_rank_that_waits_in_its_own_file_store_past_hard_timeout_is_ended(start: Start) -> None:
    limits = {"soft_timeout": 6.0, "hard_timeout": 12.0, "progress_watchdog_interval": 0.25}
    job = start(2, target(laddering.wait_for_a_file_store), limits=limits, group_timeout=90.0, env=SHORT)
    job.await_sign("waits", rank=0)
    job.await_sign("ready", rank=1)
    job.let_on("ready")
    ranks = job.wait()
    assert (ranks[0].signal is not None, ranks[1].value) == (True, 1)
    ended = [told for told in job.interruptions() if told.interruption is Interruption.HARD_TIMEOUT]
    assert {told.rank for told in ended} == {0}
    assert {told.detector.name for told in ended if told.detector} <= {"leave", "watchdog"}


def test_rank_whose_abort_hook_takes_longer_than_the_abort_limit_lives(start: Start) -> None:
    job = start(2, target(laddering.abort_slowly), seconds=5.0, env=SHORT)
    assert [rank.value for rank in job.wait()] == [1, 1]
    assert not job.of(events.AbortStuck)
    assert not job.of(events.RankSignalled)


@pytest.mark.parametrize("limit", ["0.5", "3"])
def test_rank_that_nothing_frees_from_group_building_is_replaced_after_the_abort_limit(
    start: Start, limit: str
) -> None:
    job = start(2, target(laddering.stay_in_group_building), env={"RESILIENCE_ABORT_LIMIT": limit})
    job.await_sign("waits", rank=0)
    job.await_sign("ready", rank=1)
    job.let_on("ready")
    ranks = job.wait()
    assert (ranks[0].signal is not None, ranks[1].value) == (True, 1)
    (stuck,) = job.of(events.AbortStuck, rank=0)
    assert stuck.event.limit_s == float(limit)
    assert stuck.event.where.endswith("_new_process_group_helper")
    # Not before the limit. Load only makes it later, so nothing is asked of that.
    (cut,) = job.of(events.AbortCut, rank=0)
    signalled = job.of(events.RankSignalled, rank=0)[0]
    assert stuck.mono_ns - cut.mono_ns >= float(limit) * 1e9
    assert signalled.mono_ns - cut.mono_ns >= float(limit) * 1e9
    assert signalled.event.reason == "abort"


@pytest.mark.parametrize("place", ["run", pytest.param("initialize", marks=pytest.mark.slow)])
def test_abort_hook_that_hangs_is_ended_at_hard_timeout_and_named(start: Start, place: str) -> None:
    job = start(2, target(laddering.hang_in_the_abort), place=place)
    ranks = job.wait()
    assert (ranks[0].value, ranks[1].signal is not None) == (1, True)
    assert {record.event.limit for record in job.of(events.RankFellSilent, rank=1)} == {"hook:abort"}
    (record,) = [told for told in job.interruptions() if told.interruption is Interruption.HARD_TIMEOUT]
    assert (record.stage, record.hang) == ("abort", None)
    assert "__call__" in [frame.function for stack in record.stacks[1:] for frame in stack.frames]
