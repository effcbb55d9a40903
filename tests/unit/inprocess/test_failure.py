"""Whose fault an exception is, and what hooks get to see of it."""

from __future__ import annotations

import traceback

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from resilience.core.attribution import FaultOrigin
from resilience.errors import RankShouldRestart
from resilience.inprocess import failure


def of_rank_1(error: BaseException) -> CheckpointException:
    return CheckpointException("save", {1: (error, traceback.StackSummary())})


@pytest.fixture(params=[0, 1])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("RANK", str(request.param))
    monkeypatch.setenv("WORLD_SIZE", "2")
    return int(request.param)


@pytest.mark.parametrize("is_cutting", [False, True])
def test_checkpoint_that_fails_is_the_fault_of_the_rank_that_it_names(rank: int, is_cutting: bool) -> None:
    cause = OSError("disk full")
    error = of_rank_1(cause)
    origin = failure.origin_of(error, is_cutting)
    followed: FaultOrigin = "consequence" if is_cutting else "communication"
    assert origin == ("own" if rank == 1 else followed)
    assert failure.own_cause(error, origin) is (cause if rank == 1 else None)
    assert failure.restarts_all(error)


def test_checkpoint_that_an_interruption_cut_short_is_nobodys_fault(rank: int) -> None:
    assert failure.origin_of(of_rank_1(RankShouldRestart()), is_cutting=True) == "consequence"
