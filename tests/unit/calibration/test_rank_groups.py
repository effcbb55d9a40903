"""Which ranks are alike: clear gaps make groups, gradual differences do not."""

from __future__ import annotations

import random

from resilience.calibration.rank_groups import RankPace, holds, named, split


def test_stages_of_a_pipeline_are_groups() -> None:
    paces = {rank: RankPace((1.0 + 0.5 * (rank // 4) + 0.01 * (rank % 4),)) for rank in range(12)}
    assert split(paces) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]


def test_ranks_that_were_slow_in_one_of_two_runs_are_no_group() -> None:
    """The node was slow, not what these ranks do. The next run may have other ranks there."""
    assert split({rank: RankPace((4.4 if rank > 1 else 2.0, 2.0)) for rank in range(4)}) == [(0, 1, 2, 3)]
    assert split({rank: RankPace((4.4, 2.0) if rank > 1 else (2.0, 4.4)) for rank in range(4)}) == [(0, 1, 2, 3)]
    slower = {rank: RankPace((4.4, 8.8, 3.0) if rank > 1 else (2.0, 4.0, 2.0)) for rank in range(4)}
    assert split(slower) == [(0, 1), (2, 3)]


def test_rank_that_saves_in_every_run_is_a_group() -> None:
    assert split({rank: RankPace((1.0,), 30.0 if rank == 0 else 1.2) for rank in range(4)}) == [(0,), (1, 2, 3)]


def test_ranks_that_differ_gradually_are_one_group() -> None:
    chance = random.Random(1)
    assert len(split({rank: RankPace((1.0 + rank / 500,), 1.0 + chance.random()) for rank in range(1024)})) == 1


def test_many_groups_are_none() -> None:
    assert split({rank: RankPace((1.5**rank,)) for rank in range(9)}) == [tuple(range(9))]
    assert len(split({rank: RankPace((1.0 + rank % 2,)) for rank in range(1024)})) == 1  # a name of 512 ranges


def test_name_of_a_group_holds_its_ranks() -> None:
    assert named([7, 0, 5, 6, 2]) == "0,2,5-7"
    assert [rank for rank in range(10) if holds("0,2,5-7", rank)] == [0, 2, 5, 6, 7]
