"""Workers in an uninterruptible wait of the kernel, by a virtual clock."""

from __future__ import annotations

import pytest

from resilience.launcher.worker.unkillable import Uninterruptible
from resilience.system.environment import uninterruptible_limit
from resilience.system.processes import ProcessState


class Kernel:
    """Processes and their states."""

    def __init__(self, limit: float) -> None:
        self.now = 0.0
        self.states: dict[int, str] = {}
        self.watched = Uninterruptible(limit, self._state, lambda: self.now)

    def exceeded(self, seconds: float, **states: str) -> list[int]:
        """Look after so many seconds. states: of process p1, p2 …"""
        self.now += seconds
        self.states = {int(name[1:]): state for name, state in states.items()}
        return self.watched.exceeded([1, 2])

    def _state(self, pid: int) -> ProcessState | None:
        state = self.states.get(pid)
        return None if state is None else ProcessState(state, 0.0, 0, 1, 0, None, 0)


def test_process_exceeds_the_limit_only_if_it_has_waited_at_each_look() -> None:
    kernel = Kernel(10.0)
    assert kernel.exceeded(0.0, p1="D", p2="D") == []
    assert kernel.exceeded(9.0, p1="D", p2="S") == []
    assert kernel.exceeded(1.0, p1="D", p2="D") == [1]
    assert kernel.exceeded(9.0, p1="S", p2="D") == []
    assert kernel.exceeded(1.0, p2="D") == [2]


def test_without_a_limit_no_process_exceeds_it() -> None:
    kernel = Kernel(0.0)
    assert kernel.exceeded(0.0, p1="D") == kernel.exceeded(10.0**9, p1="D") == []


@pytest.mark.parametrize(
    ("value", "limit"), [("60", 60.0), ("0.5", 0.5), ("", 0.0), ("-1", 0.0), ("soon", 0.0), ("nan", 0.0), ("inf", 0.0)]
)
def test_torchs_variable_is_a_positive_number_of_seconds(
    monkeypatch: pytest.MonkeyPatch, value: str, limit: float
) -> None:
    monkeypatch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", value)
    assert uninterruptible_limit() == limit
