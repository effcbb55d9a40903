"""Who takes part next: claims about single memberships, and what holds for every order of events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from resilience.core import membership
from resilience.core.membership import (
    Arrivals,
    Arrived,
    Assignment,
    Entry,
    Excluded,
    Left,
    Membership,
    NodeSeat,
    Nothing,
)


def seat(id: str, node: str | None = None) -> NodeSeat:
    return NodeSeat(id, node or id[0], "10.0.0.1", 4000)


def in_order(wanted: Sequence[Assignment]) -> Mapping[str, int]:
    return {each.seat.id: rank for rank, each in enumerate(wanted)}


def formed(*ids: str, cycle: int = 0, spares: Sequence[str] = ()) -> Membership:
    seats = tuple(map(seat, ids))
    return Membership(cycle, seats, tuple(map(seat, spares)), holders=tuple(each.node for each in seats))


def after(last: Membership, *entries: Entry) -> Arrivals:
    return membership.fold(membership.begin(last), entries)


def arrived(*ids: str) -> list[Entry]:
    return [Arrived(seat(id), known=9) for id in ids]


def previous(last: Membership, now: Arrivals, most: int = 9) -> dict[str, int | None]:
    """What `form` tells of the ranks that its nodes had."""
    told: dict[str, int | None] = {}

    def note(wanted: Sequence[Assignment]) -> Mapping[str, int]:
        told.update({each.seat.id: each.previous for each in wanted})
        return in_order(wanted)

    membership.form(now, most, note)
    return told


def test_first_cycle_waits_for_the_last_call_unless_it_is_full() -> None:
    now = after(Membership(), *arrived("a", "b"))
    assert not membership.is_due(now, 2, 3, last_call_is_over=False)
    assert membership.is_due(now, 2, 3, last_call_is_over=True)
    assert membership.is_due(now, 1, 2, last_call_is_over=False)
    assert not membership.is_due(now, 3, 3, last_call_is_over=True)


def test_later_cycle_is_formed_once_all_of_the_last_are_there() -> None:
    last = formed("a", "b")
    assert not membership.is_due(after(last, *arrived("a")), 1, 3, last_call_is_over=True)
    assert membership.is_due(after(last, *arrived("a", "b")), 1, 3, last_call_is_over=False)


@pytest.mark.parametrize("entry", [Left("b"), Excluded("b")])
def test_node_that_is_gone_is_not_waited_for(entry: Entry) -> None:
    now = after(formed("a", "b"), *arrived("a"), entry)
    assert now.missing == []
    assert [each.id for each in membership.form(now, 2, in_order).seats] == ["a"]


def test_nodes_of_the_last_cycle_go_before_those_that_waited() -> None:
    now = after(formed("a", "b"), *arrived("new", "b", "a"))
    made = membership.form(now, 2, in_order)
    assert {each.id for each in made.seats} == {"a", "b"}
    assert [each.id for each in made.spares] == ["new"]


def test_arrival_of_an_agent_unaware_of_its_place_does_not_count_for_the_next_cycle() -> None:
    last = formed("a", "b", cycle=3)
    now = after(last, Arrived(seat("a"), known=2), Arrived(seat("c"), known=2))
    assert set(now.arrived) == {"c"}
    assert [each.id for each in now.missing] == ["a", "b"]
    assert set(after(last, Left("a"), Arrived(seat("a"), known=2)).gone) == {"a"}
    assert set(after(last, Left("a"), Arrived(seat("a"), known=3)).arrived) == {"a"}


def test_spares_get_free_places_in_the_order_in_which_they_came() -> None:
    now = after(formed("a", "b", spares=["c", "d"]), Left("b"), *arrived("a"))
    made = membership.form(now, 2, in_order)
    assert ({each.id for each in made.seats}, [each.id for each in made.spares]) == ({"a", "c"}, ["d"])


def test_waiting_counts_those_that_would_take_part() -> None:
    last = formed("a", "b", spares=["c"])
    assert after(last).waiting(2) == 0
    assert after(last, Left("b")).waiting(2) == 1
    assert after(last).waiting(3) == 1
    assert after(last, *arrived("a")).waiting(2) == 1  # it is through with the cycle


def test_node_keeps_its_rank_and_has_it_again_when_it_returns() -> None:
    last = formed("a1", "b1", "c1")
    smaller = membership.form(after(last, Left("c1"), *arrived("a1", "b1")), 3, in_order)
    now = after(smaller, *arrived("c2", "b1", "a1"))
    assert previous(smaller, now) == {"a1": 0, "b1": 1, "c2": 2}


def test_node_that_was_never_there_has_no_former_rank() -> None:
    last = formed("a1", "b1", "c1")
    now = after(last, Left("b1"), Left("c1"), *arrived("a1", "d1", "c2"))
    assert previous(last, now) == {"a1": 0, "d1": None, "c2": 2}


def test_two_agents_of_one_node_do_not_share_a_rank() -> None:
    last = formed("a1", "a2", "b1")
    now = after(last, Left("a2"), *arrived("a3", "a4", "a1", "b1"))
    assert previous(last, now) == {"a1": 0, "b1": 2, "a3": 1, "a4": None}


def test_excluded_node_stays_away_for_good() -> None:
    made = membership.form(after(formed("a", "b"), Excluded("b"), *arrived("a")), 2, in_order)
    assert made.excluded == ("b",)
    assert [each.id for each in after(made, *arrived("b", "a")).candidates] == ["a"]


def test_agent_that_gave_up_may_come_again() -> None:
    now = after(formed("a"), *arrived("b"), Left("b"), *arrived("b"))
    assert "b" in now.arrived and "b" not in now.gone


IDS, NODES = st.sampled_from(["a1", "a2", "b1", "c1", "d1"]), st.sampled_from("abcd")
ENTRIES = st.one_of(
    st.builds(Arrived, st.builds(NodeSeat, IDS, NODES, st.just("h"), st.just(1))),
    st.builds(Left, IDS),
    st.builds(Excluded, NODES),
    st.just(Nothing()),
)


@given(st.lists(st.lists(ENTRIES, max_size=12), max_size=5), st.integers(1, 3), st.integers(0, 3))
def test_every_membership_is_whole_and_forgets_no_agent(log: list[list[Entry]], least: int, more: int) -> None:
    most, last = least + more, Membership()
    for entries in log:
        now = membership.fold(membership.begin(last), entries)
        one_by_one = membership.begin(last)
        for entry in entries:
            one_by_one = membership.fold(one_by_one, [entry])
        assert one_by_one == now
        if not membership.is_due(now, least, most, last_call_is_over=True):
            continue
        made = membership.form(now, most, in_order)
        placed = [each.id for each in (*made.seats, *made.spares)]
        assert sorted(placed) == sorted(now.arrived)  # a place or a turn for everybody, once
        assert least <= len(made.seats) <= most
        assert len(made.seats) == most or not made.spares
        assert not any(each.node in made.excluded for each in made.seats)
        assert (made.cycle, made.entries) == (last.cycle + 1, last.entries + len(entries))
        assert membership.decode_membership(membership.encode(made)) == made
        last = made


def test_change_without_one_of_its_seats_is_read_as_a_whole() -> None:
    last = formed("a", "b")
    change = membership.difference(last, formed("a", "b", "c", cycle=1))
    (added,) = change.seats or ()
    assert membership.changed(last, replace(change, size=3, seats=(added,))) is not None
    assert membership.changed(last, replace(change, size=4, seats=(added,))) is None
    assert membership.changed(last, replace(change, size=2**63, seats=())) is None


def test_only_a_node_that_gave_up_its_seat_before_any_other_end_of_it_has_left_by_itself() -> None:
    lost = Left("b", "silent", is_lost=True)
    now = after(formed("a", "b", "c", "d"), Left("a"), lost, Left("b"), *arrived("c"), Left("c"))
    assert now.left == {"a"}
    assert now.gone == {"a", "b", "c"}
