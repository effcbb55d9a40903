"""Comparing the collectives that ranks have entered."""

from __future__ import annotations

import pytest

from resilience.core import wait_for
from resilience.core.wait_for import Walk, are_together, expected, walk
from resilience.facts.interruptions import Collective

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
    found = walk(last, {0, 1}, {0: 0, 1: 1})
    assert found == Walk(cycle=(0, 1), behind=frozenset((0, 1)))


def test_rank_that_waits_for_something_unknown_is_not_awaited() -> None:
    last = {0: [at(8)], 1: [at(7, left=True)]}
    assert walk(last, {0, 1}, RANKS).awaited == ()


def test_rank_of_which_nothing_is_known_gets_no_edge() -> None:
    assert walk({0: [at(8)], 2: [at(8)]}, {0, 2}, RANKS) == Walk(unknown=frozenset((1, 3)))


def test_rank_that_waits_may_wait_for_one_whose_place_in_that_group_is_not_on_record() -> None:
    """Ranks 0 and 2 wait for 1 and 3, and rank 1 for rank 3, which is stopped: its recorder cannot be read."""
    first, second, third = ({"group": group, "is_recorded": True} for group in (1, 2, 3))
    last = {
        0: [at(5, members=(0, 1, 2), **first)],
        1: [at(4, left=True, members=(0, 1, 2), **first), at(3, members=(1, 2, 2), **third)],
        2: [at(5, members=(2, 1, 2), **second)],
        3: [at(4, left=True, members=(2, 1, 2), group=12), at(2, left=True, members=(1, 2, 2), group=13)],
    }
    found = walk(last, {0, 1, 2}, RANKS)
    assert (found.awaited, found.unknown) == ((), {3})
    whole = last | {3: [at(4, left=True, members=(2, 1, 2), **second), at(2, left=True, members=(1, 2, 2), **third)]}
    assert walk(whole, {0, 1, 2}, RANKS) == Walk((3,), (), frozenset((1, 3)))


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
    ("numbers", "odd"), [((9, 8, 8, 8), (0,)), ((8, 8, 9, 8), (2,)), ((9, 8), ()), ((9, 9, 8, 8), ())]
)
def test_ranks_that_all_wait_in_their_group_with_different_numbers_are_out_of_step(
    numbers: tuple[int, ...], odd: tuple[int, ...]
) -> None:
    """One has left a collective that failed, and waits in the next one."""
    members = (0, 1, len(numbers))
    last = {rank: [at(seq, members=members)] for rank, seq in enumerate(numbers)}
    mismatch = walk(last, set(last), RANKS).mismatch
    assert mismatch is not None and (mismatch.ranks, mismatch.odd) == (tuple(last), odd)


@pytest.mark.parametrize(
    ("other", "awaited"),
    [
        ([at(8, left=True)], (3,)),  # it is elsewhere
        ([at(8), at(4, group=2)], ()),  # it may wait in another group
        ([at(8), at(4, group=2, is_transfer=True)], ()),
        ([at(7), at(8, left=True)], ()),  # it waits in neither
    ],
)
def test_ranks_with_different_numbers_are_not_out_of_step_while_a_member_may_be_elsewhere(
    other: list[Collective], awaited: tuple[int, ...]
) -> None:
    last = {rank: [at(9)] for rank in (0, 1, 2)} | {3: other}
    waiting = {0, 1, 2} if awaited else {0, 1, 2, 3}
    found = walk(last, waiting, RANKS)
    assert found.mismatch is None and 3 in found.behind
    assert walk({rank: entries for rank, entries in last.items() if rank != 3}, {0, 1, 2}, RANKS).mismatch is None
    unknown = {0: [at(9, members=None)], 1: [at(8, members=None)]}
    assert walk(unknown, {0, 1}, RANKS).mismatch is None


def test_ranks_are_together_if_they_have_a_collective_in_common() -> None:
    assert are_together({0: [at(8), at(9)], 1: [at(9)]}, {0, 1})
    assert not are_together({0: [at(8)], 1: [at(9)]}, {0, 1})
    assert not are_together({0: [at(9)]}, {0, 1})
    assert not are_together({0: [at(9)], 1: [at(9, left=True)]}, {0, 1})
    assert not are_together({}, set())


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
