"""The hooks that come with the package: when they end the job, exclude a rank, or leave one in reserve."""

from __future__ import annotations

from typing import Any

import pytest

from resilience.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    FaultCounterExceeded,
    HealthCheckError,
    RestartAbort,
)
from resilience.inprocess.abort import AbortTorchDistributed
from resilience.inprocess.health_check import CudaHealthCheck, FaultCounter
from resilience.inprocess.initialize import RetryController
from resilience.inprocess.rank_filter import MaxActiveWorldSize, WorldSizeDivisibleBy
from resilience.inprocess.state import State, Status


def world(size: int, active: int | None = None, iteration: int = 0) -> State:
    return State(0, size, 0, 8, size if active is None else active, iteration)


# -- RetryController ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "options", "reason"),
    [
        (world(8, iteration=3), {"max_iterations": 3}, "3 iterations ended with a restart, and max_iterations is 3"),
        (world(3), {"min_world_size": 4}, "3 of 8 initial ranks take part, and min_world_size is 4"),
        (world(8, 3), {"min_active_world_size": 4}, "3 of 8 initial ranks would run the function"),
        (world(8, 0), {}, "min_active_world_size is 1"),
    ],
)
def test_retry_controller_ends_the_job(state: State, options: dict[str, int], reason: str) -> None:
    with pytest.raises(RestartAbort, match=reason):
        RetryController(**options)(state)


@pytest.mark.parametrize(
    ("state", "options"),
    [
        (world(8, iteration=2), {"max_iterations": 3}),
        (world(8, iteration=10**6), {}),
        (world(4, 3), {"min_world_size": 4, "min_active_world_size": 3}),
    ],
)
def test_retry_controller_lets_the_job_go_on(state: State, options: dict[str, int]) -> None:
    assert RetryController(**options)(state) is state


# -- FaultCounter -------------------------------------------------------------------------------------


def test_rank_that_fails_too_often_is_excluded() -> None:
    counter, state, error = FaultCounter(2), State(rank=1, world_size=4), ValueError("again")
    assert counter(state, error) == (state, error)
    assert counter(state, error) == (state, error)
    with pytest.raises(FaultCounterExceeded, match=r"failed 3 times, limit 2 .*ValueError: again") as raised:
        counter(state, error)
    assert isinstance(raised.value, HealthCheckError)
    assert raised.value.__cause__ is error


def test_faults_of_others_and_checks_before_the_start_do_not_count() -> None:
    counter = FaultCounter(0)
    for _ in range(5):
        counter(State(rank=0, world_size=2), None)
    assert counter.faults_count == 0


@pytest.mark.parametrize("error", [ConnectionResetError("peer"), RuntimeError("wrapped")])
def test_error_that_left_a_communication_call_excludes_no_rank(error: Exception) -> None:
    """Its verdict has a confidence of 0.4: a peer's end shows there too."""
    error.__cause__ = ConnectionResetError("peer")
    counter, state = FaultCounter(0), State(rank=1, world_size=4)
    assert counter(state, error) == (state, error)
    assert counter.faults_count == 0


def test_error_that_left_a_communication_call_beside_an_abort_of_its_own_rank_counts() -> None:
    """Its backend may refuse new groups until that abort returns, if it ever does."""
    counter, state, error = FaultCounter(0), State(rank=1, world_size=4), ConnectionResetError("refused")
    state.failed_beside_abort = True
    with pytest.raises(FaultCounterExceeded):
        counter(state, error)


def test_without_a_bound_faults_are_only_counted() -> None:
    counter = FaultCounter()
    for _ in range(5):
        counter(State(rank=0, world_size=2), ValueError())
    assert counter.faults_count == 5


# -- filters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank_filter", "size", "active"),
    [
        (MaxActiveWorldSize(4), 6, 4),
        (MaxActiveWorldSize(4), 3, 3),
        (MaxActiveWorldSize(), 6, 6),
        (WorldSizeDivisibleBy(4), 11, 8),
        (WorldSizeDivisibleBy(4), 3, 0),
        (WorldSizeDivisibleBy(), 5, 5),
    ],
)
def test_filter_leaves_the_ranks_from_the_active_world_on_in_reserve(rank_filter: Any, size: int, active: int) -> None:
    states = [rank_filter(State(rank=rank, world_size=size)) for rank in range(size)]
    assert {state.active_world_size for state in states} == {active}
    assert [state.status for state in states] == [Status.ACTIVE] * active + [Status.INACTIVE] * (size - active)
    assert {state.world_size for state in states} == {size}


def test_filters_narrow_down_what_an_earlier_one_left() -> None:
    state = WorldSizeDivisibleBy(3)(MaxActiveWorldSize(5)(State(rank=3, world_size=9)))
    assert (state.active_world_size, state.status) == (3, Status.INACTIVE)


# -- where there is nothing to do ---------------------------------------------------------------------


def test_cuda_check_of_a_process_without_cuda_does_nothing() -> None:
    state, error = State(rank=0, world_size=1), ValueError()
    assert CudaHealthCheck()(state, error) == (state, error)


def test_abort_of_a_process_without_groups_does_nothing() -> None:
    state = State(rank=0, world_size=1)
    assert AbortTorchDistributed()(state) is state


# -- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda value: RetryController(max_iterations=value), 0),
        (lambda value: RetryController(min_world_size=value), -1),
        (lambda value: RetryController(min_active_world_size=value), -1),
        (FaultCounter, -1),
        (MaxActiveWorldSize, 0),
        (WorldSizeDivisibleBy, 0),
    ],
)
def test_number_out_of_bounds_is_refused(make: Any, value: int) -> None:
    with pytest.raises(ConfigurationError, match=f"is {value}, expected a whole number from") as raised:
        make(value)
    assert not isinstance(raised.value, ConfigurationTypeError)
    for wrong in (1.0, "1", True):
        with pytest.raises(ConfigurationTypeError, match="expected a whole number"):
            make(wrong)
