"""All ranks draw the same fault from the same seed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.errors import ConfigurationError, ConfigurationTypeError
from resilience.inprocess.tools.inject_fault import Fault, draw, inject_fault


@given(
    faults=st.lists(st.sampled_from(Fault), min_size=1),
    bounds=st.tuples(st.integers(0, 10), st.integers(0, 10)).map(lambda pair: tuple(sorted(pair))),
    keep_alive=st.integers(0, 20),
    seed=st.integers(),
    size=st.integers(1, 16),
)
def test_draw_keeps_to_its_bounds_and_is_the_same_for_all(
    faults: list[Fault], bounds: Any, keep_alive: int, seed: int, size: int
) -> None:
    drawn = draw(faults, bounds, keep_alive, (1.0, 2.5), seed, size)
    assert drawn == draw(faults, bounds, keep_alive, (1.0, 2.5), seed, size)
    breakable = max(0, size - keep_alive)
    assert min(bounds[0], breakable) <= len(drawn.ranks) <= min(bounds[1], breakable)
    assert len(set(drawn.ranks)) == len(drawn.ranks)
    assert all(keep_alive <= rank < size for rank in drawn.ranks)
    assert drawn.fault in faults
    assert 1.0 <= drawn.delay <= 2.5


def test_seeds_differ() -> None:
    drawn = [draw(list(Fault), (0, 8), 0, (0.0, 9.0), seed, 8) for seed in range(100)]
    assert {one.fault for one in drawn} == set(Fault)
    assert {rank for one in drawn for rank in one.ranks} == set(range(8))
    assert len({one.delay for one in drawn}) == 100


def test_exact_numbers_are_taken_as_they_are() -> None:
    drawn = draw((Fault.KILL,), 2, 0, 3, seed=1, world_size=4)
    assert (len(drawn.ranks), drawn.fault, drawn.delay) == (2, Fault.KILL, 3.0)


def test_rank_that_is_not_drawn_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    called: list[str] = []
    inject_fault((Fault.KILL,), 3, keep_alive=1, delay=0.0, seed=3, callback=lambda: called.append("struck"))
    assert called == []


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (((), 1, 0, 0.0), ConfigurationTypeError),
        ((("KILL",), 1, 0, 0.0), ConfigurationTypeError),
        (((Fault.KILL,), -1, 0, 0.0), ConfigurationError),
        (((Fault.KILL,), (3, 2), 0, 0.0), ConfigurationError),
        (((Fault.KILL,), 1, -1, 0.0), ConfigurationError),
        (((Fault.KILL,), 1, 0, -1.0), ConfigurationError),
        (((Fault.KILL,), 1, 0, (2.0, 1.0)), ConfigurationError),
    ],
)
def test_unusable_arguments_are_refused(arguments: Any, kind: type[Exception]) -> None:
    faults, num_faults, keep_alive, delay = arguments
    with pytest.raises(kind):
        draw(faults, num_faults, keep_alive, delay, seed=0, world_size=4)


def test_names_are_those_of_the_api() -> None:
    assert {fault.name for fault in Fault} == {
        "GPU",
        "GPU_SLEEP",
        "ASYNC_EXC",
        "SIGNAL_EXC",
        "ABORT",
        "GIL",
        "SEGFAULT",
        "INT",
        "KILL",
        "TERM",
        "STOP",
    }
