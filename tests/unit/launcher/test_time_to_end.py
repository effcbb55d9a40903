"""How much time do workers have to end, and how long does the host of the store wait for those of other nodes?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from resilience.core.cycle import CycleDecision
from resilience.core.rendezvous import LEAVE_LIMIT
from resilience.launcher.arguments import Options
from resilience.launcher.cycle_supervisor import CycleSupervisor
from resilience.launcher.launch import leave_limit
from resilience.launcher.worker.worker_processes import EndedWorker

STOPS = CycleDecision("preempted", "a", exit_code=143, detail="SIGTERM to the agent of a")
EXHAUSTED = CycleDecision("exhausted", "a", exit_code=1, detail="no restart is left")
LEAVES = CycleDecision("preempted", "a", again="membership")
CUT_OFF = CycleDecision("failed", "a", exit_code=1, detail="node a could not reach the job's store")


@pytest.mark.parametrize(
    ("verdict", "is_job_over", "limit"),
    [(STOPS, True, 30.0), (EXHAUSTED, True, 30.0), (LEAVES, False, 0.0), (CUT_OFF, False, 0.0)],
)
def test_workers_of_a_node_without_the_store_have_their_time_if_there_is_no_next_cycle(
    verdict: CycleDecision, is_job_over: bool, limit: float
) -> None:
    supervisor: Any = CycleSupervisor.__new__(CycleSupervisor)
    supervisor._options = Options()
    supervisor._supervision = SimpleNamespace(is_job_over=is_job_over)
    supervisor.handler = SimpleNamespace(time_left=0.0, is_taken_for_lost=lambda: True)
    supervisor.stopping = SimpleNamespace(is_hurried=lambda verdict: False)
    assert supervisor.stop_limit(verdict, 30.0) == limit
    assert supervisor.is_urgent(verdict) is not is_job_over


def test_monitor_learns_the_status_of_an_ended_worker_while_another_still_runs() -> None:
    """The kernel does not tell a process that looks late. A monitor that learns no status records an interruption."""
    first, last = EndedWorker(0, 0, 11, 0), EndedWorker(1, 1, 12, 0)
    told: list[EndedWorker] = []
    told_at_looks: list[list[EndedWorker]] = []

    class Running:
        living: tuple[int, ...] = (0, 1)

        def collect(self) -> list[EndedWorker]:
            told_at_looks.append([*told])
            self.living = self.living[1:]
            return [last if not self.living else first]

    supervisor: Any = CycleSupervisor.__new__(CycleSupervisor)
    supervisor._options = Options()
    supervisor._supervision = SimpleNamespace(is_job_over=True)
    supervisor.drain = None
    supervisor.stopping = SimpleNamespace(is_hurried=lambda verdict: False)
    supervisor.witnesses = Mock(is_stop_heard=True, reaped=told.append)
    assert supervisor.let_finish(Running(), STOPS) == [first, last]
    assert (told_at_looks, told) == ([[], [first]], [first, last])


@pytest.mark.parametrize(
    ("options", "shutdown_timeout", "limit"),
    [
        (Options(), 30.0, LEAVE_LIMIT),
        (Options(stop_grace=900.0), 30.0, 990.0),
        (Options(stop_grace=900.0, term_timeout=100.0), 30.0, 1060.0),
        (Options(term_timeout=5.0), 500.0, 590.0),
    ],
)
def test_host_of_the_store_waits_longer_than_workers_may_take(
    options: Options, shutdown_timeout: float, limit: float
) -> None:
    assert leave_limit(options, shutdown_timeout) == limit
