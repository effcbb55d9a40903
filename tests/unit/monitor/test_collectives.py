"""The collectives that a record names: what it keeps, and what it says about the rest."""

from __future__ import annotations

import pytest

from resilience.monitor.collectives import GROUPS, last_collectives
from resilience.monitor.page import COLLECTIVES, MonitorSide, Page, RankSide


@pytest.mark.parametrize(
    ("groups", "calls", "is_cut"),
    [
        (GROUPS, GROUPS, False),
        (GROUPS + 1, GROUPS + 1, True),
        (2, COLLECTIVES - 2, False),
        (2, COLLECTIVES + 1, True),
    ],
)
def test_record_without_room_for_all_groups_says_so(groups: int, calls: int, is_cut: bool) -> None:
    page = Page.create()
    rank = RankSide(page)
    for number in range(calls):
        rank.collective_entered(number % groups, number // groups, "all_reduce")
    named = last_collectives(MonitorSide(page).collectives())
    assert len({each.group for each in named}) == min(groups, GROUPS)
    assert [each.is_cut for each in named] == [is_cut] + [False] * (len(named) - 1)
