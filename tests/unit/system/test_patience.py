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


def test_limit_counts_anew_after_the_process_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed = [3000.0 + second for second in range(40)]
    assert ended_after(monkeypatch, [1.0, 2.0, *resumed]) == 3000.0 + LIMIT + 1.0


def test_busy_machine_that_delays_checks_a_little_ends_the_wait_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended_after(monkeypatch, [float(second) for second in range(0, 60, 6)]) == 18.0
