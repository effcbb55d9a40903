"""What signals to an agent mean while its workers stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from resilience.core.cycle import CycleDecision
from resilience.launcher import stopping
from resilience.launcher.signals import Signals
from resilience.launcher.stopping import NodeSignals
from resilience.system.channel import close_all

NAMES = ("SIGINT", "SIGTERM")
STOPS = CycleDecision("preempted", "a", exit_code=130, detail="SIGINT to the agent of a")


@pytest.fixture
def signals() -> Iterator[Signals]:
    before = {name: signal.signal(signal.Signals[name], signal.SIG_DFL) for name in NAMES}
    signals = Signals(",".join(NAMES))
    yield signals
    for name, handler in before.items():
        signal.signal(signal.Signals[name], handler)
    signal.set_wakeup_fd(-1)  # or the next signal writes into whatever has this descriptor's number then
    close_all([signals._read, signals._write])


def node(signals: Signals) -> NodeSignals:
    unused: Any = None
    return NodeSignals(unused, unused, unused, signals, unused)


@pytest.mark.parametrize("is_early", [True, False], ids=["before the verdict is read", "after that"])
def test_first_ctrl_c_does_not_shorten_grace_if_another_agent_stopped_the_job(signals: Signals, is_early: bool) -> None:
    own = node(signals)
    assert is_early or not own.is_hurried(STOPS)
    signal.raise_signal(signal.SIGINT)
    assert not own.is_hurried(STOPS)
    assert not signals.has_any()  # nor does it end the wait for the other agents
    signal.raise_signal(signal.SIGINT)
    assert own.is_hurried(STOPS)
    assert not own.is_hurried(STOPS)


def test_ctrl_c_after_the_signal_that_stops_the_job_hurries_and_a_second_sigterm_does_not(signals: Signals) -> None:
    signal.raise_signal(signal.SIGTERM)
    assert signals.take() == [signal.SIGTERM]
    for number, is_hurried in ((signal.SIGTERM, False), (signal.SIGINT, True)):
        signal.raise_signal(number)
        assert node(signals).is_hurried(STOPS) is is_hurried


def test_ctrl_c_is_kept_while_the_other_nodes_continue(signals: Signals) -> None:
    leaves = CycleDecision("preempted", "a", again="membership")
    signal.raise_signal(signal.SIGTERM)
    signals.take()
    signal.raise_signal(signal.SIGINT)
    assert not node(signals).is_hurried(leaves)
    assert signals.take() == [signal.SIGINT]


def test_ctrl_c_that_comes_together_with_the_signal_that_stops_the_job_hurries(signals: Signals) -> None:
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert signals.take_first() == signal.SIGTERM
    assert signals.is_hurried()


class LateSignal:
    """The signals of an agent that gets one at a time of a virtual clock, which is also the clock of the module."""

    def __init__(self, at: float) -> None:
        self.now = 100.0
        self._at = self.now + at

    def monotonic(self) -> float:
        return self.now

    def has_any(self) -> bool:
        return self.now >= self._at

    def wait(self, limit: float) -> None:
        self.now = min(self.now + limit, max(self.now, self._at))


@pytest.mark.parametrize(("agents_at", "is_preemption"), [(0.0, True), (0.8, True), (1.5, False), (60.0, False)])
def test_dead_workers_sigterm_is_a_preemption_if_its_agent_is_signalled_within_a_second(
    monkeypatch: pytest.MonkeyPatch, agents_at: float, is_preemption: bool
) -> None:
    signals: Any = LateSignal(agents_at)
    monkeypatch.setattr(stopping, "time", signals)
    assert node(signals).await_signal() is is_preemption
    assert signals.now == 100.0 + min(agents_at, 1.0)  # it waits no longer than the signal, or the second, takes


def test_worker_that_caught_sigterm_alone_is_ended_as_failed_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = LateSignal(60.0)
    monkeypatch.setattr(stopping, "time", clock)
    unused: Any = None
    witnesses: Any = SimpleNamespace(sigterms={0: clock.now, 1: clock.now + 0.7}, condemned=set())
    monitors = Mock()
    own = NodeSignals(unused, unused, monitors, unused, witnesses)
    condemned = []
    for _ in range(2):
        clock.now += 0.8
        own.end_terminated_workers()
        condemned.append(set(witnesses.condemned))
    assert condemned == [set(), {0}]
    monitors.dismiss_one.assert_called_once_with(0, "SIGTERM to this worker")
