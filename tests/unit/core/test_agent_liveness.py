"""Which agents are silent for too long, and for how long one that is cut off may go on."""

from __future__ import annotations

import pytest

from resilience.core.agent_liveness import LEASE, LOOKS, Lease, SignsOfLife, Silences, Timer, count_every
from tests.unit.core.agents import Run


def test_agent_is_lost_once_its_count_has_stood_still_for_the_limit() -> None:
    run, silences = Run(), Silences(interval=2.0, limit=8.0)
    run.counts("a")
    run.counts("b")
    run.falls_silent("b")
    lost: list[list[str]] = []
    for _ in range(6):
        lost.append(run.run(silences.lost(["a", "b"])))
        run.now += 2.0
    assert lost == [[], [], [], [], ["b"], ["b"]]
    run.counts("b")  # it only stood still
    assert run.run(silences.lost(["a", "b"])) == []


def test_pause_of_the_one_that_looks_counts_two_intervals() -> None:
    run, silences = Run(), Silences(interval=2.0, limit=8.0)
    run.counts("a")
    run.falls_silent("a")
    run.run(silences.lost(["a"]))
    run.now += 100.0
    assert run.run(silences.lost(["a"])) == []
    run.now += 100.0
    assert run.run(silences.lost(["a"])) == ["a"]


def test_look_costs_one_operation_for_any_number_of_agents_and_none_within_the_interval() -> None:
    run, silences = Run(), Silences(interval=2.0, limit=8.0)
    for name in "abc":
        run.counts(name)
    run.run(silences.lost("ab"))
    assert run.operations == 1
    run.now += 1.0
    run.run(silences.lost("ab"))
    assert run.operations == 1
    asked: list[object] = []
    run.before = asked.append
    run.run(silences.lost("abc"))
    assert [operation.keys for operation in asked] == [("beat/c",)]  # type: ignore[attr-defined]


def test_timer_runs_only_while_its_condition_holds() -> None:
    timer = Timer(3.0)
    assert not timer.has_run_out(True, 0.0)
    assert not timer.has_run_out(False, 2.0)
    assert not timer.has_run_out(True, 4.0)
    assert timer.has_run_out(True, 7.0)
    assert not timer.has_run_out(False, 8.0)


def test_lease_runs_out_before_the_others_go_on_and_for_good() -> None:
    lease, limit = Lease(8.0), 8.0
    pause = LEASE * limit / LOOKS
    assert lease.seconds == LEASE * limit
    assert not any(lease.look(1, number * pause) for number in range(LOOKS))
    assert lease.time_left(5.0) is None
    assert lease.look(1, 6.0)
    assert lease.time_left(6.0) == limit - lease.seconds
    assert lease.look(2, 6.5)  # a count that gets through now is too late
    assert all(lease.look(2, 20.0 + number * pause) for number in range(2 * LOOKS))
    assert lease.time_left(7.0) == 1.0
    assert lease.time_left(20.0) == 0.0


@pytest.mark.parametrize("intervals", [0.5, 1.0, 1.4, 4.0, 100.0])
def test_agent_that_counts_keeps_its_lease_for_any_limit(intervals: float) -> None:
    """keep_alive_max_attempt=1 is legal, and 0.5 too."""
    interval = 2.0
    limit = intervals * interval
    lease, pause = Lease(limit), count_every(interval, limit)
    looks = [number * lease.seconds / LOOKS for number in range(10 * LOOKS)]
    assert not any(lease.look(int(now / pause), now) for now in looks)


def test_agent_counts_once_in_an_interval_unless_one_of_its_limits_needs_more() -> None:
    assert count_every(2.0, 8.0, 160.0) == 2.0
    assert count_every(2.0, 2.0, 160.0) == count_every(2.0, 160.0, 2.0) == LEASE * 2.0 / 3


def test_lease_of_an_agent_that_was_asked_to_stop_is_shorter() -> None:
    lease = Lease(160.0)
    assert not any(lease.look(1, float(second)) for second in range(5))
    lease.shorten(500.0)
    assert not lease.is_shortened
    lease.shorten(10.0)
    assert (lease.seconds, lease.is_shortened) == (10.0, True)
    looks = [lease.look(1, float(second)) for second in range(5, 12)]
    assert looks == [False] * 5 + [True] * 2


def test_count_that_gets_through_renews_the_lease_and_a_pause_of_this_agent_costs_little() -> None:
    lease = Lease(8.0)
    for number in range(100):
        assert not lease.look(number, 0.3 * number)
    assert not lease.look(99, 1000.0)


def test_agent_that_stood_still_keeps_its_lease_and_has_no_time_left_where_it_then_runs_out() -> None:
    lease, pause = Lease(8.0), 6.0 / LOOKS
    lease.look(1, 0.0)
    assert not lease.look(1, 9.0)  # the others may have gone on, if they did not stand still too
    looks = [lease.look(1, 9.0 + number * pause) for number in range(1, LOOKS)]
    assert looks.index(True) in (LOOKS - 3, LOOKS - 2)  # the gap counted as two looks, but for rounding
    assert lease.time_left(14.7) == 0.0


def looks(run: Run, ids: str, times: int = 6) -> list[bool | None]:
    """Look for signs of life as often, once in an interval."""
    signs, seen = SignsOfLife(interval=2.0, limit=8.0), []
    for _ in range(times):
        seen.append(run.run(signs.look(ids)))
        run.now += 2.0
    return seen


def test_one_agent_that_counts_after_the_first_look_shows_that_one_lives() -> None:
    run = Run()
    for id in "ab":
        run.counts(id)
    run.falls_silent("b")
    assert looks(run, "ab", 3) == [None, True, True]


def test_no_agent_lives_once_all_of_them_were_silent_for_the_limit() -> None:
    run = Run()
    for id in "ab":
        run.counts(id)
        run.falls_silent(id)
    assert looks(run, "ab") == [None, None, None, None, False, False]


def test_pause_of_the_agent_that_looks_for_signs_of_life_is_not_their_silence() -> None:
    run, signs = Run(), SignsOfLife(interval=2.0, limit=8.0)
    run.counts("a")
    run.falls_silent("a")
    assert run.run(signs.look("a")) is None
    run.now += 100.0
    assert run.run(signs.look("a")) is None


def test_count_that_was_deleted_is_a_sign_of_life() -> None:
    run = Run()
    run.counts("a")
    run.falls_silent("a")
    assert looks(run, "ab", 1) == [True]


def test_no_agents_show_no_sign_of_life() -> None:
    assert looks(Run(), "", 1) == [False]
