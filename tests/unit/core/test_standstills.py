"""How much of a silence the host stood still, and how long its monitor may sleep."""

from __future__ import annotations

import pytest

from resilience.core.standstills import (
    NOTICEABLE,
    REMEMBERED,
    Standstill,
    longest,
    longest_sleep,
    since_standstills,
    united,
)


@pytest.mark.parametrize(
    ("since", "later_by"),
    [(0.0, 5.0), (10.0, 5.0), (12.0, 3.0), (13.0, 2.0), (20.0, 2.0), (21.0, 1.0), (22.0, 0.0), (30.0, 0.0)],
)
def test_silence_is_shorter_by_the_standstills_since_its_beginning(since: float, later_by: float) -> None:
    standstills = [Standstill(10.0, 13.0), Standstill(20.0, 22.0)]
    assert since_standstills(standstills, since) == since + later_by


def test_time_in_which_host_and_store_stood_still_counts_once() -> None:
    host, store = Standstill(10.0, 20.0), Standstill(15.0, 18.0)
    assert united([store, host]) == [host]
    assert united([Standstill(18.0, 25.0), host]) == [Standstill(10.0, 25.0)]
    assert united([Standstill(20.0, 25.0), host]) == [Standstill(10.0, 25.0)]
    assert united([Standstill(21.0, 25.0), host]) == [host, Standstill(21.0, 25.0)]


def test_many_short_standstills_do_not_displace_a_long_one() -> None:
    standstills = [Standstill(0.0, 600.0)]
    for number in range(2 * REMEMBERED):
        standstills = longest([*standstills, Standstill(1000.0 + number, 1000.3 + number)])
    assert len(standstills) == REMEMBERED
    assert standstills[0] == Standstill(0.0, 600.0)


def test_monitor_sleeps_for_a_quarter_of_its_shortest_limit() -> None:
    assert longest_sleep([600.0, 60.0]) == 15.0
    assert longest_sleep([600.0, 0.1]) == NOTICEABLE
    assert longest_sleep([]) == float("inf")
