"""What a job of a Wrapper is advised about its launcher, and that the advice holds in its world."""

from __future__ import annotations

import pytest

from resilience.inprocess._runtime.launcher_check import advice
from resilience.system.environment import Launcher

RULE = "when a rank dies, this launcher starts all workers again; "
MIN_HEALTHY = "with --ft-restart-policy min-healthy the Wrapper continues without that rank"


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "way"),
    [
        (3, 1, f"{MIN_HEALTHY}, down to the minimum of --nnodes"),
        (1, 2, "the Wrapper can continue without that rank only with one agent for each rank (--nproc-per-node 1, "),
        (2, 4, f"{MIN_HEALTHY}'s node, down to the minimum of --nnodes, if its rank_assignment gives up whole nodes"),
    ],
)
def test_way_to_continue_without_a_dead_rank_is_one_that_this_job_has(
    monkeypatch: pytest.MonkeyPatch, nodes: int, ranks_per_node: int, way: str
) -> None:
    monkeypatch.setenv("RESILIENCE_RESTART_POLICY", "any-failed")
    monkeypatch.setenv("RESILIENCE_SHORTEST_LIMIT", "")
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(nodes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_per_node))
    (line,) = advice(Launcher.from_environment(), 90.0)
    assert line.startswith(RULE + way)


@pytest.mark.parametrize("policy", ["", "min-healthy", "any-failed"])
def test_job_of_one_rank_has_no_rank_to_continue_without(policy: str) -> None:
    assert list(advice(Launcher(policy, None), 90.0)) == []


def test_limit_of_the_launcher_below_the_hard_timeout_is_named() -> None:
    (line,) = advice(Launcher("min-healthy", 60.0, 2, 1), 90.0)
    assert "after 60 s of silence" in line and "until 90 s (hard_timeout)" in line
