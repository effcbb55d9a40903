"""Comparing the collectives that ranks have entered."""

from __future__ import annotations

import pytest

from resilience.core import wait_for
from resilience.core.attribution import Collective
from resilience.core.wait_for import Walk, expected, walk

RANKS = {rank: rank for rank in range(4)}
ALL = (0, 1, 4)


def at(seq: int, op: str = "all_reduce", group: int = 1, left: bool = False, **more: object) -> Collective:
    return Collective(group, seq, op, left, **{"members": ALL, **more})  # type: ignore[arg-type]


def test_rank_with_the_lowest_sequence_number_is_awaited() -> None:
    last = {0: [at(8)], 1: [at(7, left=True)], 2: [at(8)], 3: [at(8)]}
    assert walk(last, {0, 2, 3}, RANKS).awaited == (1,)


def test_walk_goes_on_over_ranks_that_wait_themselves() -> None:
    """Ranks 2 and 3 wait for rank 1, which waits in another group for rank 0."""
    pair = {"members": (0, 1, 2), "group": 2}
    last = {0: [at(7, left=True), at(3, left=True, **pair)], 1: [at(7, left=True), at(4, **pair)], 2: [at(8)]}
    found = walk(last, {1, 2}, RANKS)
    assert (found.awaited, found.behind) == ((0,), {0, 1})


def test_ranks_that_wait_for_each_other_are_a_cycle() -> None:
    """Each of the two is in another group first: no rank is more to blame than the other."""
    last = {0: [at(5), at(6, group=2, left=True)], 1: [at(4, left=True), at(7, group=2)]}
    assert walk(last, {0, 1}, RANKS) == Walk(cycle=(0, 1), behind=frozenset((0, 1)))


def test_rank_that_waits_for_something_unknown_is_not_awaited() -> None:
    last = {0: [at(8)], 1: [at(7, left=True)]}
    assert walk(last, {0, 1}, RANKS).awaited == ()


def test_rank_of_which_nothing_is_known_gets_no_edge() -> None:
    assert walk({0: [at(8)], 2: [at(8)]}, {0, 2}, RANKS) == Walk()


def test_rank_that_receives_waits_for_the_sender_alone() -> None:
    pipe = {"members": (1, 1, 2), "group": 9, "is_transfer": True, "op": "transfer"}
    last = {rank: [at(8, left=True)] for rank in RANKS} | {2: [at(3, **pipe)], 1: [at(2, left=True, **pipe)]}
    assert walk(last, {2}, RANKS).awaited == (1,)


def test_ranks_are_named_by_their_initial_ranks() -> None:
    seats = {0: 0, 1: 2, 2: 3}
    last = {0: [at(8, members=(0, 1, 3))], 2: [at(7, left=True)], 3: [at(8, members=(0, 1, 3))]}
    assert walk(last, {0, 3}, seats).awaited == (2,)


@pytest.mark.parametrize(
    ("operations", "odd"),
    [
        (("all_reduce", "barrier", "all_reduce", "all_reduce"), (1,)),  # by number
        (("all_reduce", "barrier"), ()),  # neither
    ],
)
def test_fewer_ranks_in_another_operation_of_one_number_are_odd(operations: tuple[str, ...], odd: tuple[int]) -> None:
    last = {rank: [at(8, op)] for rank, op in enumerate(operations)}
    mismatch = walk(last, set(last), RANKS).mismatch
    assert mismatch is not None and (mismatch.ranks, mismatch.odd) == (tuple(last), odd)


def test_of_two_ranks_the_one_that_leaves_the_pattern_is_odd() -> None:
    last = {0: [at(8, expected="all_reduce")], 1: [at(8, "barrier", expected="all_reduce")]}
    mismatch = walk(last, {0, 1}, RANKS).mismatch
    assert mismatch is not None and mismatch.odd == (1,)


def test_what_torch_has_recorded_goes_before_what_python_has_called() -> None:
    """A barrier from Python is new to the Python calls of its rank; in all collectives it is the same number."""
    recorded = {"is_recorded": True, "group": 5}
    last = {
        0: [at(40, **recorded)],
        1: [at(1, "barrier"), at(40, "barrier", **recorded)],
        2: [at(40, **recorded)],
    }
    mismatch = walk(last, {0, 1, 2}, RANKS).mismatch
    assert mismatch is not None and mismatch.odd == (1,)


@pytest.mark.parametrize(
    ("before", "next_one"),
    [
        ("", ""),
        ("aa", ""),
        ("aaa", "a"),
        ("xyaaa", "a"),  # after a start that differs
        ("abababa", "b"),
        ("aaabaaabaaabaaa", "b"),  # equal ones within a longer pattern
        ("abcd", ""),
    ],
)
def test_pattern_of_operations_tells_the_next_one(before: str, next_one: str) -> None:
    assert expected(list(before)) == next_one


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [1, 5, 9], [7]])
def test_members_at_a_constant_distance_are_kept(ranks: list[int]) -> None:
    first, step, size = wait_for.entered(1, 1, "barrier", True, wait_for.pack(ranks), ()).members or (0, 0, 0)
    assert list(range(first, first + step * size, step)) == ranks


def test_members_without_a_constant_distance_are_left_out() -> None:
    word = wait_for.pack([0, 1, 5], is_recorded=True)
    entry = wait_for.entered(1, 1, "barrier", True, word, ())
    assert (entry.members, entry.is_recorded, entry.is_transfer) == (None, True, False)
