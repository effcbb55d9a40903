"""Cutting, aborting and dropping real process groups.

The ranks run `tests.process.groups`. Every group has a timeout of 30 minutes: who comes free was cut."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.process import groups
from tests.support.ranks import Job

Start = Callable[..., Job]


def values(job: Job) -> list[Any]:
    """What the ranks returned."""
    finished = job.wait_ranks(200.0)
    assert [rank.code for rank in finished] == [0] * len(finished), f"{finished}{job.output()}"
    return [rank.value for rank in finished]


def target(body: Callable[..., Any]) -> str:
    return f"tests.process.groups:{body.__name__}"


@pytest.mark.parametrize("lazy", ["0", "1"])
def test_groups_may_be_dropped_before_gloo_has_seen_the_cut(start: Start, lazy: str) -> None:
    job = start(4, target(groups.cut_and_drop), env={"TORCH_GLOO_LAZY_INIT": lazy}, rounds=20)
    assert all(sockets > 0 for sockets in values(job))


@pytest.mark.parametrize("lazy", ["0", "1"])
def test_groups_may_be_dropped_while_the_copies_of_their_sockets_are_being_closed(start: Start, lazy: str) -> None:
    """gloo ends a process whose device it shuts down while a copy is still open."""
    job = start(4, target(groups.cut_and_let_go_on_a_busy_host), env={"TORCH_GLOO_LAZY_INIT": lazy}, rounds=3)
    assert all(sockets > 0 for sockets in values(job))


@pytest.mark.parametrize("pause", [0.0, 0.02])
@pytest.mark.parametrize("lazy", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_user_code_may_destroy_its_groups_while_they_are_cut(start: Start, lazy: str, pause: float) -> None:
    job = start(4, target(groups.destroy_while_being_cut), env={"TORCH_GLOO_LAZY_INIT": lazy}, rounds=20, pause=pause)
    assert values(job) == [20] * 4


@pytest.mark.parametrize("lazy", ["0", "1"])
def test_cut_frees_every_rank_and_spares_the_users_connections(start: Start, lazy: str) -> None:
    job = start(4, target(groups.cut_rounds), env={"TORCH_GLOO_LAZY_INIT": lazy}, rounds=10, shape=False)
    cuts = values(job)
    methods = {method for rank in cuts for method, _ in rank}
    assert "epoll" in methods
    assert methods <= {"epoll", "shape"}  # a loop thread that happens to run shows nothing
    # Whoever cuts first leaves less to the others, so only the whole world's sum is certain.
    assert all(sum(rank[number][1] for rank in cuts) > 0 for number in range(10))


def test_cut_finds_the_same_sockets_by_their_sets_shape(start: Start) -> None:
    cuts = values(start(4, target(groups.cut_rounds), rounds=4, shape=True))
    assert {method for rank in cuts for method, _ in rank} == {"shape"}


@pytest.mark.parametrize(("size", "rounds"), [(1, 60), (200_000, 30)])
def test_cut_frees_every_rank_from_collectives_that_are_under_way(start: Start, size: int, rounds: int) -> None:
    counts = values(start(3, target(groups.cut_under_way), rounds=rounds, size=size, seed=7))
    assert [sum(cuts) for cuts in zip(*counts, strict=True)] == [6] * rounds  # each its own: no end came before


def test_rank_whose_peer_never_connects_is_freed(start: Start) -> None:
    freed, _ = values(start(2, target(groups.wait_for_one_who_left), rounds=30))
    assert freed > 0  # in the other rounds it had to connect itself, and was refused: the higher port does


def test_cut_of_the_stores_connections_frees_a_rank_from_building_a_group(start: Start) -> None:
    assert values(start(1, target(groups.be_cut_while_building))) == [True]


def test_groups_can_be_built_after_a_build_that_was_interrupted_anywhere(start: Start) -> None:
    values(start(1, target(groups.build_after_interrupted_builds)))


def test_drop_takes_torchs_excepthook_back(start: Start) -> None:
    values(start(1, target(groups.keep_excepthook)))


def test_drop_says_so_if_it_does_not_know_this_torch(start: Start) -> None:
    [message] = values(start(1, target(groups.refuse_unknown_torch)))
    assert "_update_default_pg" in message
    assert "expected torch 2.12" in message


def test_process_may_end_while_groups_are_going(start: Start) -> None:
    [finished] = start(1, target(groups.exit_while_dropping)).wait_ranks()
    assert finished.code == 0, finished


def test_accelerator_groups_are_aborted_though_one_hangs_and_one_fails(start: Start) -> None:
    [outcomes] = values(start(1, target(groups.abort_accelerators)))
    assert outcomes == ["timed out", "failed", "aborted", "aborted"]


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_only_connections_to_the_port_are_cut(start: Start, family: int, host: str) -> None:
    values(start(1, target(groups.cut_one_port), family=int(family), host=host))


def test_place_in_torch_distributed_is_reported(start: Start) -> None:
    [(outside, inside)] = values(start(1, target(groups.tell_where)))
    assert outside is None
    file, _, function = inside.partition(" ")
    assert "/torch/distributed/" in file and function


def test_without_torch_there_is_nothing_to_do_and_nothing_is_imported() -> None:
    program = """if True:
        import sys
        from resilience.system import collectives, group_aborts
        assert collectives.cut_gloo_sockets() == collectives.last_cut() == collectives.NO_CUT
        group_aborts.abort_all(1.0)
        assert group_aborts.last() == []
        assert not collectives.groups_alive()
        collectives.drop_groups()
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)
