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


def test_rank_that_does_not_exist_is_refused_on_every_rank() -> None:
    params = SimulatedFaultParams("rank_killed", 3.0, rank_to_fail=8)
    for rank in range(8):
        with pytest.raises(ConfigurationError, match="rank_to_fail is 8, expected a rank from 0 to 7"):
            simulated.schedule(params, rank, world_size=8)


def test_mapping_is_read_as_configuration_files_give_it() -> None:
    assert parsed({"fault_type": "random", "base_delay": 1}) == SimulatedFaultParams("random", 1)
    assert parsed(None) is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"fault_type": "rank_gone", "base_delay": 1.0}, "expected one of rank_killed, rank_hung, random"),
        ({"fault_type": "random", "base_delay": -1.0}, "base_delay is -1.0, expected seconds, 0 or more"),
        ({"fault_type": "random", "base_delay": "60"}, "base_delay is '60', expected seconds, 0 or more"),
        ({"fault_type": "random", "base_delay": float("nan")}, "base_delay is nan, expected"),
        ({"fault_type": "random", "base_delay": 1, "rand_delay": float("inf")}, "rand_delay is inf, expected"),
        ({"fault_type": "random", "base_delay": True}, "base_delay is True, expected"),
        ({"fault_type": "random", "base_delay": 1, "rank_to_fail": "3"}, "rank_to_fail is '3', expected a rank"),
        ({"fault_type": "random", "base_delay": 1, "rank_to_fail": -1}, "rank_to_fail is -1, expected a rank"),
        ({"fault_type": "random", "base_delay": 1, "rank_to_fail": False}, "rank_to_fail is False, expected a rank"),
        ({"fault_type": ["random"], "base_delay": 1}, r"fault_type is \['random'\], expected one of"),
        ({"fault_type": "random"}, "expected fault_type, base_delay, rand_delay, rank_to_fail"),
        ({"fault_type": "random", "base_delay": 1.0, "rank": 3}, "has the keys fault_type, base_delay, rank, expected"),
    ],
)
def test_wrong_plan_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parsed(params)
