"""How long a thread waits for an answer of the store, also if its process stood still meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from resilience.system import patience
from resilience.system.patience import Patience

LIMIT = 10.0


class Connection:
    ended = 0

    def shut_down(self) -> None:
        self.ended += 1


def ended_after(monkeypatch: pytest.MonkeyPatch, checks: list[float], allowed: float = 0.0) -> float | None:
    """Return at which of these checks the wait is ended that begins at 0."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(patience, "time", clock)
    connection: Any = Connection()
    bounds = Patience(object(), (connection,), LIMIT, 1.0)
    ended: list[float] = []

    def wait() -> None:
        for clock.now in checks:
            bounds.check()
            if connection.ended:
                ended.append(clock.now)
                return

    bounds.ask(wait, allowed)
    return ended[0] if ended else None


def test_wait_is_ended_once_it_exceeds_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    every_second = [float(second) for second in range(40)]
    assert ended_after(monkeypatch, every_second) == LIMIT + 1.0  # two checks find it overdue
    assert ended_after(monkeypatch, every_second, allowed=5.0) == 5.0 + LIMIT + 1.0


def test_time_in_which_the_process_stood_still_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed = [3000.0 + second for second in range(40)]
    assert ended_after(monkeypatch, [0.0, 1.0, 2.0, *resumed]) == 3000.0 - 3.0 + LIMIT + 1.0  # it was to check at 3.0


def test_wait_is_ended_however_often_the_process_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [20.0 * minute + second for minute in range(20) for second in range(9)]
    assert ended_after(monkeypatch, checks) == 11.0 + LIMIT + 1.0  # it stood still from 9.0 to 20.0


def test_busy_machine_that_delays_checks_a_little_ends_the_wait_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended_after(monkeypatch, [float(second) for second in range(0, 60, 6)]) == 18.0


def test_time_before_the_first_check_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended_after(monkeypatch, [100.0 + second for second in range(40)]) == 100.0 + LIMIT + 1.0
