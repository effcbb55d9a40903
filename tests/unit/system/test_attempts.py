"""Each launch of a job has an attempt and a folder of its own, and all its processes agree on them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from resilience.errors import ConfigurationError
from resilience.system import attempts
from resilience.system.attempts import Launch, agree, allocate, newest, share


def unused() -> NoReturn:
    raise AssertionError("another process has allocated already")


def test_each_launch_creates_the_folder_of_the_next_attempt(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    made = [allocate(root, "team/job7", None, 0) for _ in range(3)]
    assert [launch.attempt for launch in made] == [0, 1, 2]
    assert len({launch.token for launch in made}) == 3
    assert {path.name for path in root.iterdir()} == {"team%2Fjob7", "team%2Fjob7@1", "team%2Fjob7@2"}


def test_restart_count_of_the_scheduler_is_where_the_search_begins(tmp_path: Path) -> None:
    assert [allocate(tmp_path, "job", None, 2).attempt for _ in range(2)] == [2, 3]


def test_attempt_that_is_asked_for_is_taken_only_if_it_is_free(tmp_path: Path) -> None:
    assert allocate(tmp_path, "job", 3, 3).attempt == 3
    with pytest.raises(ConfigurationError, match=r"RESILIENCE_ATTEMPT is 3, .*Unset RESILIENCE_ATTEMPT") as refused:
        allocate(tmp_path, "job", 3, 3)
    assert str(tmp_path / "job@3") in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["job@3"]


def test_launch_whose_folder_cannot_be_created_has_an_attempt_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert allocate(tmp_path / "file" / "runs", "job", None, 1).attempt == 1
    assert allocate(tmp_path / "file", "job", None, 0).attempt == 0


def test_one_process_allocates_and_the_others_take_its_launch(tmp_path: Path) -> None:
    store = dist.HashStore()
    first = agree(store, tmp_path, "a", lambda: allocate(tmp_path, "job", None, 0))
    assert agree(store, tmp_path, "b", unused) == share(store, Launch("other", 7)) == first
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


def test_attempt_that_is_taken_is_an_error_in_every_process(tmp_path: Path) -> None:
    store = dist.HashStore()
    allocate(tmp_path, "job", 0, 0)
    for process in "ab":
        with pytest.raises(ConfigurationError, match="RESILIENCE_ATTEMPT is 0"):
            agree(store, tmp_path, process, lambda: allocate(tmp_path, "job", 0, 0))


def die() -> NoReturn:
    raise KeyboardInterrupt


def test_one_process_takes_the_place_of_one_that_ended_before_it_published_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "ALLOCATION_LIMIT", 0.0)
    store, said = dist.HashStore(), list[str]()
    for process in ("a/1", "b/2"):
        with pytest.raises(KeyboardInterrupt):
            agree(store, tmp_path, process, die, say=said.append)
    third = agree(store, tmp_path, "c/3", lambda: allocate(tmp_path, "job", None, 0), say=said.append)
    assert agree(store, tmp_path, "d/4", unused, say=said.append) == third
    assert third.attempt == 0
    words = "created no run folder within 0 s"
    assert said == [f"a {words}; b creates one", f"b {words}; c creates one"]


def test_wait_for_another_process_lets_handlers_of_signals_run_each_second(tmp_path: Path) -> None:
    """They run only between two waits: torch waits in C++."""
    waits = list[float]()

    class Store(dist.HashStore):
        def wait(self, keys: list[str], timeout: timedelta) -> None:
            waits.append(timeout.total_seconds())
            share(self, Launch("job", 3))

    store = Store()
    with pytest.raises(KeyboardInterrupt):
        agree(store, tmp_path, "a", die)
    assert agree(store, tmp_path, "b", unused).attempt == 3
    assert waits and max(waits) <= 1.0


def test_process_that_ended_before_its_launcher_started_all_again_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "ALLOCATION_LIMIT", 3600.0)
    store, said = dist.HashStore(), list[str]()

    def killed() -> NoReturn:
        allocate(tmp_path, "job", None, 0)
        die()

    with pytest.raises(KeyboardInterrupt):
        agree(store, tmp_path, "a/1", killed)
    again = agree(store, tmp_path, "a/2", lambda: allocate(tmp_path, "job", None, 0), start=1, say=said.append)
    assert agree(store, tmp_path, "b/3", unused, start=1) == agree(store, tmp_path, "b/4", unused, start=2) == again
    assert (again.attempt, said) == (1, [])


def test_folder_of_the_slower_of_two_processes_that_allocate_is_removed(tmp_path: Path) -> None:
    store = dist.HashStore()

    def overtaken() -> Launch:
        own = allocate(tmp_path, "job", None, 0)
        share(store, allocate(tmp_path, "job", None, 0))
        return own

    assert agree(store, tmp_path, "a", overtaken).attempt == 1
    assert [path.name for path in tmp_path.iterdir()] == ["job@1"]


def test_newest_attempt_is_that_of_the_same_launch_where_it_is_known(tmp_path: Path) -> None:
    for name in ("job", "job@1", "job@2", "job@node-ab", "other@9"):
        (tmp_path / name).mkdir()
    assert newest(tmp_path, "job", lambda folder: folder.name == "job@1") == 1
    assert newest(tmp_path, "job", lambda folder: False) == 2
    assert newest(tmp_path, "another", lambda folder: True) is None
    assert newest(tmp_path / "missing", "job", lambda folder: True) is None
