"""The schedule and the verdict of the soak (tests.soak)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.soak import figures
from tests.soak.plan import draw

WORLDS, LOADS = (4, 8), (False, True)
FLAT = {"ranks": 4, "restarts": 40, "descriptors": 0.0, "threads": 0.0, "processes": 0.0, "anonymous_kib": 150.0}


def look(iteration: int, world: int = 4, *, is_warm: bool = True, **held: int) -> dict[str, Any]:
    return {"iteration": iteration, "world": world, "is_warm": is_warm, **dict.fromkeys(figures.HELD, 0), **held}


def test_schedule_of_a_seed_is_always_the_same() -> None:
    assert [draw(1, number, WORLDS, LOADS) for number in range(9)] == [
        draw(1, number, WORLDS, LOADS) for number in range(9)
    ]
    assert draw(1, 0, WORLDS, LOADS) != draw(2, 0, WORLDS, LOADS)


def test_growth_is_counted_at_one_size_of_the_world_and_after_the_first_checkpoint() -> None:
    looks = [
        look(0, 4, descriptors=90, is_warm=False),
        look(1, 4, descriptors=80),
        look(2, 3, descriptors=40, is_warm=False),
        look(4, 3, descriptors=44),
        look(6, 3, descriptors=50),
        look(9, 3, descriptors=52),
    ]
    leak = figures.leaks_of(7, 2, looks)
    assert leak is not None
    assert (leak.round, leak.rank, leak.world, leak.restarts, leak.descriptors) == (7, 2, 3, 3, 2)
    assert figures.leaks_of(7, 2, looks[:5]) is None


@pytest.mark.parametrize("name", figures.HELD)
def test_more_growth_than_that_of_torch_alone_and_the_allowance_is_a_leak(name: str) -> None:
    limit = FLAT[name] + figures.ALLOWED[name]
    assert figures.leaking(FLAT | {name: limit}, FLAT) == []
    (leak,) = figures.leaking(FLAT | {name: limit + 0.02}, FLAT)
    assert leak.startswith(name)


def test_restart_during_which_a_rank_is_stopped_is_named_for_that() -> None:
    strikes = [{"kind": "exception", "mono_ns": 10}, {"kind": "stop", "mono_ns": 30}]
    assert figures.cause_of(strikes, 20, 40) == figures.UNINTERRUPTIBLE
    assert figures.cause_of(strikes, 20, 25) == "exception"
    assert figures.cause_of(strikes, 5, 8) == "no fault"
