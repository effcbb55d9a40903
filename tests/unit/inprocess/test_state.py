"""A State is where its rank stands: by default what the launcher says, for a stand-in what its rank had."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from resilience.core.restart import ENTRY
from resilience.errors import ConfigurationError
from resilience.facts.seats import Seat
from resilience.inprocess.state import State, Status


def test_state_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert State() == State.from_environment() == State(3, 8, 3, 8, 8, 0, Status.INITIALIZED)


def test_without_a_launcher_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert State() == State(rank=0, world_size=1)


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("-1", "4"), ("two", "4"), ("0", "0"), ("1", "")])
def test_impossible_rank_is_refused(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigurationError, match="RANK"):
        State()


def test_function_sees_the_active_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("WORLD_SIZE", "10")
    State(rank=2, world_size=6, active_world_size=4).set_distributed_vars()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("2", "4")


def test_all_ranks_are_active_before_a_filter() -> None:
    state = State(rank=5, world_size=6, active_world_size=4, status=Status.INACTIVE)
    state.activate_all_ranks()
    assert (state.active_world_size, state.status) == (6, Status.ACTIVE)


def test_iterations_count_from_0() -> None:
    state = State(rank=0, world_size=1)
    state.advance()
    assert state.iteration == 1
    assert replace(state, iteration=4).iteration == 4


@pytest.mark.parametrize(
    ("iteration", "rank", "status"),
    [(ENTRY, 2, Status.INITIALIZED), (0, 2, Status.ABORTING), (3, 3, Status.ABORTING)],
)
def test_state_of_a_stand_in_is_that_of_its_rank(iteration: int, rank: int, status: Status) -> None:
    seat = Seat(initial_rank=6, rank=rank, world_size=5, active_world_size=3, iteration=iteration)
    state = State.from_seat(seat, "store", initial_world_size=8)
    assert state == State(rank, 5, 6, 8, 3, max(0, iteration), status)
    assert state.store == "store"
