"""Simulated faults: what is planned is the same for all ranks, and wrong plans are refused."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from resilience.errors import ConfigurationError
from resilience.integrations import simulated
from resilience.integrations.simulated import SimulatedFaultParams, parsed, planned


def test_plan_is_the_seeds_and_nothing_elses() -> None:
    params = SimulatedFaultParams("random", base_delay=10.0, rand_delay=5.0)
    plans = [planned(params, 8, f"job/0/{cycle}") for cycle in range(200)]
    assert plans == [planned(params, 8, f"job/0/{cycle}") for cycle in range(200)]
    assert {rank for rank, _, _ in plans} == set(range(8))
    assert all(10.0 <= delay <= 15.0 for _, delay, _ in plans)
    assert {number for _, _, number in plans} == {signal.SIGKILL, signal.SIGSTOP}


def test_rank_and_kind_that_are_named_are_taken() -> None:
    killed = SimulatedFaultParams("rank_killed", 1.0, rank_to_fail=5)
    hung = SimulatedFaultParams("rank_hung", 1.0, rank_to_fail=0)
    for seed in "abc":
        assert planned(killed, 8, seed) == (5, 1.0, signal.SIGKILL)
        assert planned(hung, 8, seed) == (0, 1.0, signal.SIGSTOP)


def test_fault_is_scheduled_on_its_rank_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    class Timer(threading.Timer):
        def start(self) -> None:
            made.append((self.interval, self.function, tuple(self.args), self.daemon))

    monkeypatch.setattr(threading, "Timer", Timer)
    params = SimulatedFaultParams("rank_killed", 3.0, rank_to_fail=1)
    assert simulated.schedule(params, rank=0, world_size=2) is None
    assert simulated.schedule(params, rank=1, world_size=2) is not None
    assert made == [(3.0, os.kill, (os.getpid(), signal.SIGKILL), True)]


def test_mapping_is_read_as_configuration_files_give_it() -> None:
    assert parsed({"fault_type": "random", "base_delay": 1}) == SimulatedFaultParams("random", 1)
    assert parsed(None) is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"fault_type": "rank_gone", "base_delay": 1.0}, "expected one of rank_killed, rank_hung, random"),
        ({"fault_type": "random", "base_delay": -1.0}, "expected 0 or more"),
        ({"fault_type": "random"}, "expected fault_type, base_delay, rand_delay, rank_to_fail"),
        ({"fault_type": "random", "base_delay": 1.0, "rank": 3}, "has the keys fault_type, base_delay, rank, expected"),
    ],
)
def test_wrong_plan_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parsed(params)
