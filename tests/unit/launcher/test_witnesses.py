"""What an agent knows about its workers from their monitors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from resilience.facts.identity import Origin
from resilience.facts.limits import Limits
from resilience.launcher import witnesses
from resilience.launcher.witnesses import LOOK_LIMIT, Witnesses
from resilience.monitor import messages


class Monitors:
    """Monitors whose messages a test chooses. found: what they are told about the other ranks."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, Any]] = []
        self.found: list[tuple[int, messages.OthersPositions]] = []

    def assign(self, *_: Any) -> None:
        pass

    def look(self, but: int | None = None, is_suspicion: bool = False) -> None:
        pass

    def others_found(self, local_rank: int, positions: messages.OthersPositions) -> None:
        self.found.append((local_rank, positions))

    def poll(self, limit: float) -> list[tuple[int, Any]]:
        received, self.messages = self.messages, []
        return received


@pytest.mark.parametrize("has_answered", [True, False])
def test_answer_that_came_while_the_agent_stood_still_counts(
    has_answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(witnesses, "time", SimpleNamespace(monotonic=lambda: now[0]))
    reporter: Any = SimpleNamespace(origin=Origin("job", "node0", "agent", 1))
    monitors: Any = Monitors()
    agent = Witnesses(reporter, monitors, Limits())
    for rank in range(2):
        worker: Any = SimpleNamespace(id=100 + rank, global_rank=rank, local_rank=rank, world_size=2)
        agent.watch(worker, ("", "", ""))
    monitors.messages = [(0, messages.SeeksOthers(100))]
    agent.hear()
    assert monitors.found == []
    now[0] = LOOK_LIMIT
    if has_answered:
        monitors.messages = [(1, messages.Looked(101, True, "in_collective"))]
    agent.hear()
    hangs: dict[int, Any] = {1: "in_collective"} if has_answered else {}
    missing = () if has_answered else (1,)
    assert monitors.found == [(0, messages.OthersPositions(100, hangs, missing, 0))]
