"""When does a monitor end a hung rank for which nobody has set a limit?  By the real loop, on a virtual clock.

The rank does what a plan says, at the plan's times. The delay is the time between its last sign of life and the first
signal, not what an event says about it. A real clock can only show the lower bound, because a busy host delays signals
(`tests/process/test_silent_ranks.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resilience.core.observation import Doing
from resilience.facts import events
from resilience.facts.limits import Limits, Rule
from resilience.monitor import page, server
from resilience.monitor.page import RankSide
from resilience.system.stacks import Stacks
from tests.unit.monitor.test_server import Clock, Worker

EXACT = 1e-6  # seconds: the page holds whole nanoseconds
TEN_MINUTES = 600.0
STEP = 0.5

Action = Callable[[RankSide], None]


class ExactClock(Clock):
    """Time passes only while the monitor waits."""

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)


class Plan:
    """What a rank does, and when. last: time of its last sign of life."""

    def __init__(self, at: float) -> None:
        self.actions: list[tuple[float, Action]] = [(at, lambda rank: rank.doing(Doing.FUNCTION))]
        self.last = at
        self._steps = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self._do(STEP, lambda rank, step=self._steps: rank.step(step))  # type: ignore[misc]
            self._steps += 1

    def open(self, section: str) -> None:
        self._do(STEP, lambda rank: rank.enter(section))

    def close(self, section: str, seconds: float) -> None:
        self._do(seconds, lambda rank: rank.leave(section))

    def pass_time(self, seconds: float) -> None:
        """Say nothing; the next step ends the silence."""
        self._do(seconds, lambda rank, step=self._steps: rank.step(step))  # type: ignore[misc]
        self._steps += 1

    def _do(self, later: float, action: Action) -> None:
        self.last += later
        self.actions.append((self.last, action))


class Playing:
    """The selector of a monitor. While the monitor waits, the rank acts by its plan."""

    def __init__(self, clock: Clock, rank: RankSide, plan: Plan) -> None:
        self._clock, self._rank, self._actions = clock, rank, list(plan.actions)

    def select(self, timeout: float) -> list[Any]:
        until = self._clock.now + timeout
        while self._actions and self._actions[0][0] <= until:
            self._clock.now, action = self._actions.pop(0)
            action(self._rank)
        self._clock.now = until
        return []

    def register(self, *_: Any) -> None:
        """Nothing of the rank's is read."""

    unregister = register


Signals = list[tuple[float, str]]  # seconds after the last sign of life, and the signal


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Signals]:
    """Let a rank hang as its plan says. Return what its monitor sends to it until SIGKILL, and when."""

    def sent(build: Callable[[Plan], None], ranks: int) -> Signals:
        clock, told = ExactClock(), Signals()
        plan = Plan(clock.now)
        build(plan)
        with monkeypatch.context() as virtual:
            virtual.setattr(page, "time", clock)
            virtual.setattr(server, "time", clock)
            worker = Worker(tmp_path, Limits(rule=Rule()))
            rank, monitor = worker.attach(), worker.monitor
            assert monitor._origin is not None
            monitor._origin = msgspec.structs.replace(monitor._origin, world_size=ranks)  # no other rank answers

            def send(number: int) -> None:
                told.append((clock.now - plan.last, server.signal.Signals(number).name))
                monitor.is_over = number == server.signal.SIGKILL

            virtual.setattr(worker.worker, "send", send)
            virtual.setattr(monitor.witness, "see", lambda silent_for: None)
            virtual.setattr(monitor.witness, "look", events.WorkerSeen)
            virtual.setattr(monitor.witness, "take_stacks", lambda thorough: Stacks("none"))
            monitor._snapshots.due = math.inf
            virtual.setattr(monitor, "_selector", Playing(clock, rank, plan))
            worker.worker.run()
        worker._channels[0].close()  # the monitor has closed its own end
        return told

    return sent


def hangs_before_its_pauses(plan: Plan) -> None:
    plan.train(50)


def hangs_in_its_first_section(plan: Plan) -> None:
    plan.train(50)
    plan.open("checkpoint")


def hangs_once_pauses_are_known(kind: str, evaluation: float, checkpoint: float, compilation: float) -> Any:
    def build(plan: Plan) -> None:
        plan.train(20)
        for _ in range(3):
            for section, seconds in (("evaluation", evaluation), ("checkpoint", checkpoint)):
                plan.train(50)
                plan.open(section)
                plan.close(section, seconds)
            plan.train(50)
            plan.pass_time(compilation)
        plan.train(10)
        if kind:
            plan.open(kind)

    return build


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize(
    ("build", "limit"),
    [
        pytest.param(hangs_before_its_pauses, TEN_MINUTES, id="no pause shown"),
        pytest.param(hangs_in_its_first_section, TEN_MINUTES, id="first section"),
        pytest.param(hangs_once_pauses_are_known("", 12.0, 40.0, 20.0), 200.0, id="between steps"),
        pytest.param(hangs_once_pauses_are_known("evaluation", 12.0, 40.0, 20.0), 120.0, id="evaluation"),
        pytest.param(hangs_once_pauses_are_known("checkpoint", 12.0, 40.0, 20.0), 400.0, id="checkpoint"),
        pytest.param(hangs_once_pauses_are_known("evaluation", 5.0, 40.0, 20.0), 60.0, id="a minute at least"),
    ],
)
def test_hung_rank_is_ended_at_its_limit_and_at_most_a_second_later(
    signals: Callable[..., Signals], build: Callable[[Plan], None], limit: float, ranks: int
) -> None:
    told = signals(build, ranks)
    (first, name), (killed, last) = told[0], told[-1]
    assert (name, last) == ("SIGTERM", "SIGKILL")
    assert limit - EXACT <= first <= limit + 1.0
    assert killed <= first + Limits().grace + EXACT


def test_same_job_that_goes_on_a_moment_before_its_limit_is_left_alone(signals: Callable[..., Signals]) -> None:
    def build(plan: Plan) -> None:
        hangs_once_pauses_are_known("evaluation", 12.0, 40.0, 20.0)(plan)
        plan.close("evaluation", 119.9)

    ((first, _), *_) = signals(build, 1)
    assert first >= 200.0 - EXACT  # the limit between steps, from the end of that section
