"""Groups of a world that user code destroys as it fails are kept until nothing cuts any more."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from resilience.system import collectives, group_shutdowns


class Group:
    """Like torch's ProcessGroup."""

    def __init__(self) -> None:
        self.shutdowns = 0

    def shutdown(self) -> None:
        self.shutdowns += 1


class World:
    """Like torch's registry of groups. The last group is the default one."""

    def __init__(self, **backends: str) -> None:
        groups = {Group(): backend for backend in backends.values()}
        self.default_pg: Group | None = list(groups)[-1]
        self.pg_map = {group: (backend, None) for group, backend in groups.items()}
        self.pg_backend_config = dict(groups)

    def destroy(self) -> None:
        """As `destroy_process_group` does."""
        for group in self.pg_map:
            group.shutdown()
        self.default_pg = None
        self.pg_map.clear()
        self.pg_backend_config.clear()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(subgroup="gloo", accelerators="nccl", default="cpu:gloo,cuda:nccl")
    module = SimpleNamespace(_world=world)
    for user in (collectives, group_shutdowns):
        monkeypatch.setattr(user, "_c10d" if user is collectives else "c10d", lambda: module)
    monkeypatch.setattr(collectives, "_find_sockets", lambda: ("epoll", set()))
    yield world
    collectives.drop_destroyed()
    assert collectives.await_drops() == 0


def destroy_as_it_fails(world: World) -> None:
    with contextlib.suppress(ValueError):
        try:
            raise ValueError("of the user's")
        finally:
            world.destroy()


def test_groups_that_a_failing_function_destroys_live_until_they_are_dropped(world: World) -> None:
    subgroup, accelerators, default = map(weakref.ref, world.pg_map)
    with group_shutdowns.kept(kind=Group):
        destroy_as_it_fails(world)
    gc.collect()
    assert [group() is not None for group in (subgroup, accelerators, default)] == [True, False, True]
    assert [group.shutdowns for group in collectives._destroyed] == [1, 1]
    collectives.drop_destroyed()
    assert collectives.await_drops(60.0) == 0
    gc.collect()
    assert (subgroup(), default()) == (None, None)


def test_groups_that_are_destroyed_without_a_failure_go_at_once(world: World) -> None:
    """Peers that still wait for this rank learn of it."""
    groups = [weakref.ref(group) for group in world.pg_map]
    with group_shutdowns.kept(kind=Group):
        world.destroy()
    gc.collect()
    assert [group() for group in groups] == [None] * 3


def test_group_that_is_destroyed_by_itself_goes_at_once(world: World) -> None:
    group, *_ = world.pg_map
    with group_shutdowns.kept(kind=Group), contextlib.suppress(ValueError):
        try:
            raise ValueError("of the user's")
        finally:
            group.shutdown()
    assert group.shutdowns == 1
    assert collectives._destroyed == []


def test_only_the_last_world_that_was_destroyed_is_kept(world: World) -> None:
    first = weakref.ref(next(iter(world.pg_map)))
    with group_shutdowns.kept(kind=Group):
        destroy_as_it_fails(world)
        world.__init__(default="gloo")  # type: ignore[misc]
        second = world.default_pg
        destroy_as_it_fails(world)
    assert collectives.await_drops(60.0) == 0
    gc.collect()
    assert first() is None
    assert collectives._destroyed == [second]


def test_groups_that_were_destroyed_are_dropped_with_the_others_without_another_shutdown(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Group()
    monkeypatch.setattr(collectives, "_empty_registry", lambda module: [other])
    with group_shutdowns.kept(kind=Group):
        destroy_as_it_fails(world)
    destroyed = list(collectives._destroyed)
    collectives.drop_groups()
    assert collectives.await_drops(60.0) == 0
    assert collectives._destroyed == []
    assert [group.shutdowns for group in [*destroyed, other]] == [1, 1, 1]


def test_destroyed_groups_go_at_once_where_no_restart_cuts_them(world: World) -> None:
    """The end of their connections is all that frees the peers."""
    with group_shutdowns.kept(cuts=False, kind=Group):
        destroy_as_it_fails(world)
    assert collectives._destroyed == []


def test_exception_that_the_caller_handles_is_no_failure_of_the_function(world: World) -> None:
    try:
        raise ValueError("of the caller's")
    except ValueError as error:
        with group_shutdowns.kept(outside=error, kind=Group):
            world.destroy()
    assert collectives._destroyed == []


def test_forked_child_leaves_groups_that_were_destroyed_to_its_parent(world: World) -> None:
    with group_shutdowns.kept(kind=Group):
        destroy_as_it_fails(world)
    pid = os.fork()
    if not pid:
        os._exit(len(collectives._destroyed) + 10 * len(collectives._kept[-1]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 20
    assert len(collectives._destroyed) == 2


def test_class_is_as_before_after_the_call(world: World) -> None:
    before = vars(Group)["shutdown"]
    with contextlib.suppress(KeyError), group_shutdowns.kept(kind=Group):
        assert vars(Group)["shutdown"] is not before
        raise KeyError
    assert vars(Group)["shutdown"] is before


def test_method_that_user_code_has_put_in_place_stays(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Group):
        def shutdown(self) -> None:
            pass

    def users(group: Own) -> None:
        pass

    with group_shutdowns.kept(kind=Own):
        Own.shutdown = users  # type: ignore[method-assign]
    assert vars(Own)["shutdown"] is users


def test_class_that_shuts_down_in_another_way_is_left_alone(world: World) -> None:
    class Other:
        pass

    with group_shutdowns.kept(kind=Other):
        assert "shutdown" not in vars(Other)
