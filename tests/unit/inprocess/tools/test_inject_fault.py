"""All ranks draw the same fault from the same seed."""

from __future__ import annotations

from datetime import timedelta
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


KILL = [Fault.KILL]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (((), 1, 0, 0.0, 0), ConfigurationTypeError, r"faults is \(\), expected a list"),
        ((("KILL",), 1, 0, 0.0, 0), ConfigurationTypeError, "faults is"),
        ((Fault.KILL, 1, 0, 0.0, 0), ConfigurationTypeError, r"such as \[Fault.KILL\]"),
        (({Fault.KILL}, 1, 0, 0.0, 0), ConfigurationTypeError, "faults is"),
        ((KILL, -1, 0, 0.0, 0), ConfigurationError, "num_faults is -1, expected a whole number from 0, or two"),
        ((KILL, (3, 2), 0, 0.0, 0), ConfigurationError, r"num_faults is \(3, 2\), expected .* the smaller one first"),
        ((KILL, 1.5, 0, 0.0, 0), ConfigurationTypeError, r"num_faults is 1.5 \(float\)"),
        ((KILL, "1", 0, 0.0, 0), ConfigurationTypeError, r"num_faults is '1' \(str\)"),
        ((KILL, (1, 2, 3), 0, 0.0, 0), ConfigurationTypeError, "num_faults is"),
        ((KILL, True, 0, 0.0, 0), ConfigurationTypeError, "num_faults is True"),
        ((KILL, 1, -1, 0.0, 0), ConfigurationError, "keep_alive is -1"),
        ((KILL, 1, 0, -1.0, 0), ConfigurationError, r"delay is -1.0, expected a number of seconds from 0"),
        ((KILL, 1, 0, (2.0, 1.0), 0), ConfigurationError, "delay is"),
        ((KILL, 1, 0, float("nan"), 0), ConfigurationError, "delay is nan"),
        ((KILL, 1, 0, timedelta(seconds=1), 0), ConfigurationTypeError, r"delay is datetime.timedelta\(seconds=1\)"),
        ((KILL, 1, 0, 0.0, None), ConfigurationTypeError, "seed is None, expected a number that is equal on all ranks"),
    ],
)
def test_unusable_arguments_are_refused(arguments: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        draw(*arguments, world_size=4)


def test_bounds_and_faults_may_be_any_sequence() -> None:
    assert draw([Fault.KILL], [2, 2], 0, [3, 3.0], 1, 4) == draw((Fault.KILL,), (2, 2), 0, (3, 3.0), 1, 4)
    assert draw(Fault, 1, 0, 3, 1, 4).fault in Fault  # type: ignore[arg-type]


def test_callback_that_cannot_be_called_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationTypeError, match="callback is 5, expected a function without arguments"):
        inject_fault(KILL, 0, 0, 0.0, 0, callback=5)  # type: ignore[arg-type]


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
