"""A group that user code shuts down waits for a cut."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch.distributed as dist

from resilience.system import collectives, group_shutdowns


class Group:
    """Like torch's ProcessGroup."""

    done: list[object]

    def shutdown(self) -> None:
        self.done.append(self)


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Those of gloo's devices, as (descriptor, inode)."""
    members: set[tuple[int, int]] = set()
    monkeypatch.setattr(Group, "done", [], raising=False)
    monkeypatch.setattr(collectives, "_find_sockets", lambda: ("epoll", set(members)))
    monkeypatch.setattr(collectives, "_cut_before", set())
    monkeypatch.setattr(collectives, "_given_up", set())
    return members


def test_group_is_shut_down_once_the_end_of_each_cut_connection_is_read(sockets: set[tuple[int, int]]) -> None:
    sockets.add((3, 5))
    collectives._cut_before.add(5)
    collectives._held[5] = 1 << 20  # no descriptor: nothing may close it
    group = Group()
    try:
        with group_shutdowns.after_cuts(Group):
            thread = threading.Thread(target=group.shutdown)
            thread.start()
            thread.join(0.05)
            assert Group.done == []
            sockets.clear()
            thread.join(60.0)
    finally:
        del collectives._held[5]
    assert Group.done == [group]


@pytest.mark.parametrize("is_default", [True, False])
def test_only_with_the_default_group_all_connections_are_given_up(
    sockets: set[tuple[int, int]], is_default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets.add((3, 5))
    group = Group()
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", group if is_default else None)
    with group_shutdowns.after_cuts(Group):
        group.shutdown()
    assert collectives._is_left_alone(5) is is_default
    assert Group.done == [group]


def test_shutdown_waits_for_a_cut_that_is_under_way() -> None:
    group = Group()
    with group_shutdowns.after_cuts(Group):
        thread = threading.Thread(target=group.shutdown)
        with collectives._cutting:
            thread.start()
            thread.join(0.05)
            assert Group.done == []
        thread.join(60.0)
    assert Group.done == [group]


def test_group_is_shut_down_although_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    group = Group()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with group_shutdowns.after_cuts(Group):
        group.shutdown()
    assert Group.done == [group]


def test_class_is_as_before_after_the_call() -> None:
    before = vars(Group)["shutdown"]
    with contextlib.suppress(KeyError), group_shutdowns.after_cuts(Group):
        assert vars(Group)["shutdown"] is not before
        raise KeyError
    assert vars(Group)["shutdown"] is before


def test_class_that_shuts_down_in_another_way_is_left_alone() -> None:
    class Other:
        pass

    with group_shutdowns.after_cuts(Other):
        assert "shutdown" not in vars(Other)


def test_end_that_nobody_reads_holds_a_shutdown_up_for_a_limited_time(sockets: set[tuple[int, int]]) -> None:
    """Only a child of this process has a copy of the connection."""
    sockets.add((3, 5))
    collectives._cut_before.add(5)
    group = Group()
    with group_shutdowns.after_cuts(Group):
        group.shutdown()
    assert Group.done == [group]
