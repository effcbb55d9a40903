"""What follows from a signal to an agent, or to one of its workers."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from resilience.core.stopping import Asked, on_signal, on_workers_sigterm

EVICTED = Asked(signal="SIGTERM", mode="leave", hosts_store=False, others=2, least=2)


def test_node_leaves_if_the_others_are_enough() -> None:
    assert on_signal(EVICTED) == "leave"
    assert on_signal(replace(EVICTED, others=1, least=1)) == "leave"


@pytest.mark.parametrize(
    "but",
    [{"others": 1}, {"others": 0, "least": 1}, {"hosts_store": True}, {"mode": "stop"}, {"signal": "SIGINT"}],
    ids=str,
)
def test_job_stops_if_the_others_cannot_or_shall_not_go_on(but: dict[str, object]) -> None:
    assert on_signal(replace(EVICTED, **but)) == "stop"


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("least", [1, 2, 3])
def test_of_nodes_that_are_signalled_one_after_another_the_last_ones_stop_the_job(size: int, least: int) -> None:
    decided = [on_signal(replace(EVICTED, others=size - leaving, least=least)) for leaving in range(1, size + 1)]
    leave = max(0, size - least)
    assert decided == ["leave"] * leave + ["stop"] * (size - leave)


@pytest.mark.parametrize("waited", [0.0, 0.8, 0.99])
def test_sigterm_to_a_worker_waits_for_its_agents_signal_for_a_second(waited: float) -> None:
    assert on_workers_sigterm(is_agent_signalled=False, waited=waited) == "wait"
    assert on_workers_sigterm(is_agent_signalled=True, waited=waited) == "agent"


@pytest.mark.parametrize("waited", [1.0, 1.5])
def test_sigterm_to_a_worker_alone_is_its_failure_after_a_second(waited: float) -> None:
    assert on_workers_sigterm(is_agent_signalled=False, waited=waited) == "failure"
