"""Agents in processes of their own meet, lose each other, and meet again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.process.rendezvousing import Agents, agents, meet
from tests.support.server import ForkServer

Make = Callable[..., Agents]


@pytest.fixture
def make(fork_server: ForkServer, tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def begin(nodes: str, **conf: Any) -> Agents:
            return stack.enter_context(agents(fork_server, tmp_path, nodes, **conf))

        yield begin


def test_single_node_restarts_with_a_fresh_store_each_time(make: Make) -> None:
    agent = make("1").start("a")
    assert agent.answer() is True  # it hosts
    seen = [agent.do("meet") for _ in range(3)]
    assert [told.cycle for told in seen] == [0, 1, 2]
    assert [(told.rank, told.size, told.store) for told in seen] == [(0, 1, [])] * 3
    assert len({told.address for told in seen}) == 3


def test_two_nodes_restart_with_the_same_ranks_and_a_fresh_store(make: Make) -> None:
    them = make("2").several(2)
    first = meet(them)
    assert sorted(told.rank for told in first) == [0, 1]
    assert len({told.address for told in first}) == 1
    for cycle in (1, 2):
        told = meet(them)
        assert [each.cycle for each in told] == [cycle] * 2
        assert [each.rank for each in told] == [each.rank for each in first]
        assert [each.store for each in told] == [[], []]
        assert told[0].address == told[1].address != first[0].address
