"""An id of any text has a folder of its own, and no other folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resilience.facts.identity import LONGEST_NAME, FileOwner, attempt_of, owner_of, run_name, safe_name

IDS = st.text(st.characters(codec="utf-8") | st.sampled_from("/.%@+"), min_size=1)


@given(IDS)
@example("..")
@example("../../escaped")
@example("/etc")
@example("a\0b")
def test_safe_name_is_one_component_of_a_path(job_id: str) -> None:
    name = safe_name(job_id)
    root = Path("/runs")
    assert Path(os.path.normpath(root / name)).parent == root
    assert "\0" not in name and 0 < len(name.encode()) <= LONGEST_NAME


@given(IDS, IDS)
@example("team/job7", "team%2Fjob7")
@example("job@1", "job%401")
@example("x" * 300, "x" * 301)
@example("x" * 300, safe_name("x" * 300))
@example(".", "%2E")
def test_two_ids_never_have_the_same_name(one: str, other: str) -> None:
    assert (safe_name(one) == safe_name(other)) == (one == other)


@pytest.mark.parametrize("job_id", ["job7", "4711", "train-7_b.2", "größe", "two words", "a:b"])
def test_usual_id_is_its_own_name(job_id: str) -> None:
    assert safe_name(job_id) == job_id


@given(IDS, st.integers(0, 10**6), IDS)
def test_name_of_a_run_folder_tells_the_job_and_the_attempt(job_id: str, attempt: int, other: str) -> None:
    name = run_name(job_id, attempt)
    assert attempt_of(name, job_id) == attempt
    assert (attempt_of(name, other) is None) == (other != job_id)


@pytest.mark.parametrize("name", ["job@", "job@0", "job@01", "job@node-12", "job@1@node-12", "job2", "job@-1"])
def test_other_folders_are_no_attempts(name: str) -> None:
    assert attempt_of(name, "job") is None


@given(IDS, st.none() | st.integers(0, 2**20))
@example("node-3", None)
@example("rank-agent", 7)
def test_owner_of_a_file_is_read_from_its_name(node: str, rank: int | None) -> None:
    owner = FileOwner(node, rank, is_agent=rank is None)
    assert owner_of(owner.name) == owner


@pytest.mark.parametrize("name", ["notes", "node-", "-3", "-agent", "node-three", "node--agents", "node-٣"])
def test_file_with_another_name_has_no_known_owner(name: str) -> None:
    assert owner_of(name) == FileOwner(name) and owner_of(name).name == name
