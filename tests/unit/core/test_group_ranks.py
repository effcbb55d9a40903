"""Group ranks: where they come from, and what holds for any nodes with any past."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.core import membership
from resilience.core.group_ranks import Ranks, assign, choose, worker_ranks
from resilience.core.membership import Arrived, Assignment, Entry, Excluded, Left, Membership, NodeSeat
from resilience.errors import ConfigurationError


def node(name: str, previous: int | None = None, infra: int | None = None) -> Assignment:
    return Assignment(NodeSeat(f"{name}/1", name, "10.0.0.1", 4000, infra), previous)


def ranks(*wanted: Assignment) -> dict[str, int]:
    return {id.partition("/")[0]: rank for id, rank in assign(wanted).items()}


def task(rank: int) -> tuple[str, int]:
    return "SLURM_PROCID", rank


# -- where the rank comes from ------------------------------------------------------------------------


def test_infrastructure_is_the_default_where_it_gives_a_rank() -> None:
    chosen = choose(None, task(1), 2, 2)
    assert (chosen.mode, chosen.rank, chosen.warning) == ("infrastructure", 1, "")
    assert choose(True, task(1), 2, 2).rank == 1


def test_without_a_given_rank_it_is_deterministic_and_says_so() -> None:
    for wanted in (None, False):
        chosen = choose(wanted, None, 1, 2)
        assert (chosen.mode, chosen.rank) == ("deterministic", None)
        assert "SLURM_PROCID" in chosen.why and "GROUP_RANK" in chosen.why


def test_switched_off_a_given_rank_is_not_used_and_not_checked() -> None:
    assert choose(False, task(7), 1, 2).rank is None


def test_rank_that_is_asked_for_and_not_given_is_an_error_that_names_both_variables() -> None:
    with pytest.raises(ConfigurationError, match=r"neither SLURM_PROCID nor GROUP_RANK"):
        choose(True, None, 1, 1)


def test_job_of_one_node_is_not_refused_for_its_number_in_a_larger_allocation() -> None:
    assert choose(None, task(3), 1, 1).rank is None
    assert choose(True, task(0), 1, 1).rank == 0
    with pytest.raises(ConfigurationError, match="SLURM_PROCID is 3, expected 0 to 0"):
        choose(True, task(3), 1, 1)


@pytest.mark.parametrize("given", [-1, 2, 64])
def test_rank_beyond_the_most_nodes_is_refused_before_anybody_is_met(given: int) -> None:
    with pytest.raises(ConfigurationError, match=f"on this node GROUP_RANK is {given}, expected 0 to 1"):
        choose(None, ("GROUP_RANK", given), 1, 2)


def test_room_for_spares_is_warned_about_only_with_the_infrastructures_ranks() -> None:
    assert "no hot spares" in choose(None, task(0), 1, 2).warning
    assert not choose(None, task(0), 2, 2).warning
    assert not choose(None, None, 1, 2).warning


# -- the infrastructure's order -----------------------------------------------------------------------


def test_infrastructures_ranks_win_over_previous_ones() -> None:
    assert ranks(node("a", previous=0, infra=1), node("b", previous=1, infra=0)) == {"a": 1, "b": 0}


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ([node("a", infra=0), node("b", infra=0)], "rank 0 for each of node a, b"),
        ([node("a", infra=0), node("b", previous=1)], "node b without a rank"),
    ],
)
def test_what_is_wrong_with_the_infrastructures_ranks_is_named(wanted: list[Assignment], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        assign(wanted)
    assert "each node needs its own group rank of the infrastructure" in str(caught.value)


def test_missing_nodes_leave_no_gap_between_the_infrastructures_ranks() -> None:
    lost = [node("n0", previous=0, infra=0), node("n2", previous=2, infra=2), node("n3", previous=3, infra=3)]
    assert ranks(*lost) == {"n0": 0, "n2": 1, "n3": 2}
    assert ranks(node("n3", previous=2, infra=3)) == {"n3": 0}
    back = [node("n1", infra=1), node("n3", previous=2, infra=3), node("n0", infra=0), node("n2", previous=1, infra=2)]
    assert ranks(*back) == {f"n{number}": number for number in range(4)}


@given(st.permutations(range(6)), st.randoms(use_true_random=False))
def test_valid_ranks_of_the_infrastructure_are_taken_as_they_are(given: list[int], chance: random.Random) -> None:
    wanted = [node(f"n{number}", chance.choice([None, 0, 3, 9]), infra) for number, infra in enumerate(given)]
    assert ranks(*wanted) == {f"n{number}": infra for number, infra in enumerate(given)}


# -- our own order ------------------------------------------------------------------------------------


def test_node_that_returns_leaves_others_where_they_are() -> None:
    assert ranks(node("c", previous=2), node("new"), node("a", previous=0)) == {"a": 0, "new": 1, "c": 2}


def test_node_whose_previous_rank_no_longer_exists_goes_before_new_nodes() -> None:
    assert ranks(node("aaa"), node("z", previous=5), node("m", previous=0)) == {"m": 0, "z": 1, "aaa": 2}


def test_new_nodes_stand_as_people_sort_their_names() -> None:
    assert ranks(node("node10"), node("node2"), node("node1")) == {"node1": 0, "node2": 1, "node10": 2}


pasts = st.lists(st.none() | st.integers(0, 12), max_size=10).filter(
    lambda had: len([rank for rank in had if rank is not None]) == len({rank for rank in had if rank is not None})
)


@given(pasts, st.randoms(use_true_random=False))
def test_every_node_gets_one_rank_and_keeps_its_own_where_there_is_one(
    had: list[int | None], chance: random.Random
) -> None:
    wanted = [node(f"n{number}", previous) for number, previous in enumerate(had)]
    made = assign(wanted)
    assert sorted(made.values()) == list(range(len(wanted)))
    for each in wanted:
        if each.previous is not None and each.previous < len(wanted):
            assert made[each.seat.id] == each.previous
    chance.shuffle(wanted)
    assert assign(wanted) == made  # whoever leads, in whatever order nodes came


names = st.sampled_from("abcdefg")
happenings = st.lists(st.tuples(st.sampled_from(["arrive", "leave", "exclude"]), names), max_size=8)


@given(st.lists(happenings, min_size=1, max_size=12), st.integers(1, 5))
def test_over_many_cycles_a_node_that_stays_moves_only_where_its_rank_is_gone(
    cycles: list[list[tuple[str, str]]], most: int
) -> None:
    last = Membership()
    for number, happened in enumerate(cycles):
        entries: list[Entry] = [Arrived(seat, last.cycle) for seat in last.seats]
        for what, name in happened:
            seat = NodeSeat(f"{name}/{number}", name, "10.0.0.1", 4000)
            if what == "arrive" and not any(name == other.node for other in (*last.seats, *last.spares)):
                entries.append(Arrived(seat, last.cycle))
            elif what == "leave":
                entries += [Left(other.id) for other in (*last.seats, *last.spares) if other.node == name]
            elif what == "exclude" and name == "g":
                entries.append(Excluded(name))
        now = membership.fold(membership.begin(last), entries)
        if not now.arrived:
            continue
        formed = membership.form(now, most, assign)
        assert len(formed.seats) == min(most, len(now.arrived))
        for rank, seat in enumerate(last.seats):
            if formed.rank_of(seat.id) is not None and rank < len(formed.seats):
                assert formed.rank_of(seat.id) == rank
        last = formed


# -- workers ------------------------------------------------------------------------------------------


def seat(name: str, workers: int, role: str) -> NodeSeat:
    return NodeSeat(name, name, "10.0.0.1", 4000, workers=workers, role=role)


def test_workers_follow_one_another_in_the_order_of_the_nodes() -> None:
    seats = [seat("a", 2, "trainer"), seat("b", 3, "reader"), seat("c", 4, "trainer")]
    assert [worker_ranks(seats, group_rank) for group_rank in range(3)] == [
        Ranks(first=0, size=9, first_of_role=0, size_of_role=6),
        Ranks(first=2, size=9, first_of_role=0, size_of_role=3),
        Ranks(first=5, size=9, first_of_role=2, size_of_role=6),
    ]


@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from("xyz")), min_size=1, max_size=20))
def test_each_rank_is_given_once_among_all_and_in_each_role(nodes: list[tuple[int, str]]) -> None:
    seats = [seat(str(number), *node) for number, node in enumerate(nodes)]
    made = [worker_ranks(seats, group_rank) for group_rank in range(len(seats))]
    every = [each.first + local for each, (count, _) in zip(made, nodes, strict=True) for local in range(count)]
    assert sorted(every) == list(range(made[0].size))
    for role in {role for _, role in nodes}:
        of_role = [(each, count) for each, (count, its) in zip(made, nodes, strict=True) if its == role]
        ranks = [each.first_of_role + local for each, count in of_role for local in range(count)]
        assert ranks == list(range(of_role[0][0].size_of_role))
