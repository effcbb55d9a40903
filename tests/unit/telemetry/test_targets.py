"""Prometheus finds the nodes of all jobs in one folder, and there it finds how a job ended."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from resilience.telemetry.targets import FOLDER, KEPT_FOR, Targets, announced

# What Prometheus accepts as a path of file_sd (discovery/file, patFileSDName).
ACCEPTED = re.compile(r"^[^*]*(\*[^/]*)?\.(json|yml|yaml|JSON|YML|YAML)$")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    return folder


def entries(run: Path) -> dict[str, dict[str, object]]:
    """The entries in the folder by the name of their file."""
    found = {}
    for path in (run.parent / FOLDER).iterdir():
        (found[path.name],) = json.loads(path.read_text())
    return found


def announce(run: Path, node: str) -> Targets:
    targets = Targets(run, node)
    assert targets.announce(f"{node}:9400")
    return targets


def test_entries_of_all_jobs_lie_under_a_path_that_file_sd_accepts(run: Path) -> None:
    announce(run, "n0")
    announce(run.parent / "other@1", "n0")
    assert set(entries(run)) == {"job@@n0.json", "other@1@@n0.json"}
    assert ACCEPTED.match(f"/runs/{FOLDER}/*.json")
    assert not ACCEPTED.match("/runs/*/metrics/*.sd.json")


def test_request_names_the_job_so_that_a_later_one_on_the_port_does_not_answer(run: Path) -> None:
    announce(run, "n0")
    labels = {"job_id": "job", "node": "n0", "__param_job_id": "job"}
    assert entries(run)["job@@n0.json"] == {"targets": ["n0:9400"], "labels": labels}


@pytest.mark.parametrize("outcome", ["completed", "stopped"])
def test_clean_end_removes_the_entries_of_all_nodes_also_of_a_lost_one(outcome: str, run: Path) -> None:
    announce(run, "lost")
    announce(run.parent / "job2", "n0")
    announce(run, "n0").leave(outcome, is_first=True)  # type: ignore[arg-type]
    assert set(entries(run)) == {"job2@@n0.json"}


def test_failure_leaves_an_entry_that_says_so_where_nobody_answers(run: Path) -> None:
    announce(run, "n0").leave("failed")
    labels = {"job_id": "job", "outcome": "failed"}
    assert entries(run) == {"job@@.json": {"targets": ["127.0.0.1:0"], "labels": labels}}
    announce(run, "n0")
    assert set(entries(run)) == {"job@@n0.json"}  # the job is there again


def test_failure_of_a_node_stays_if_a_scheduler_then_stops_the_others(run: Path) -> None:
    first, other, lost = announce(run, "n0"), announce(run, "n1"), announce(run, "n2")
    first.leave("failed")
    other.leave("stopped", is_first=True)
    assert set(entries(run)) == {"job@@.json"}
    lost.leave("completed")
    assert entries(run) == {}


@pytest.mark.parametrize("outcome", ["completed", "stopped"])
def test_node_that_is_not_the_first_touches_no_entry_but_its_own(
    outcome: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all nodes of a large job would list and remove the entries of all."""
    announce(run, "n0")
    last = announce(run, "n1")
    listed: list[str] = []
    with monkeypatch.context() as watched:
        watched.setattr(Path, "iterdir", lambda folder: listed.append("iterdir") or iter(()))
        watched.setattr(Path, "glob", lambda folder, pattern: listed.append("glob") or iter(()))
        last.renew()
        last.leave(outcome)  # type: ignore[arg-type]
    assert listed == []
    assert set(entries(run)) == {"job@@n0.json"}


def test_node_that_leaves_removes_its_own_entry_and_one_that_says_nothing_keeps_it(run: Path) -> None:
    announce(run, "n0").leave("left")
    announce(run, "n1").leave(None)
    assert set(entries(run)) == {"job@@n1.json"}


def test_entries_that_nobody_has_renewed_for_a_day_are_removed(run: Path) -> None:
    old, renewed = announce(run, "killed"), announce(run, "n0")
    for name in entries(run):
        os.utime(run.parent / FOLDER / name, (time.time() - KEPT_FOR - 60,) * 2)
    renewed._renew_at = 0.0
    renewed.renew()
    other = announce(run.parent / "next", "n0")
    other.renew()
    assert "job@@killed.json" in entries(run)
    other.renew(is_first=True)
    assert set(entries(run)) == {"job@@n0.json", "next@@n0.json"}
    old._renew_at = 0.0
    old.renew()  # it lives after all
    assert "job@@killed.json" in entries(run)


def test_entry_that_another_node_removed_is_written_again_at_the_next_snapshot(run: Path) -> None:
    slow, next_call = announce(run, "n0"), announce(run, "n1")
    slow.leave("completed", is_first=True)
    assert entries(run) == {}
    next_call.renew()
    assert set(entries(run)) == {"job@@n1.json"}
    next_call.leave("completed")
    next_call.renew()
    assert entries(run) == {}


def test_entries_over_http_say_so(run: Path) -> None:
    announce(run, "n0")
    announce(run.parent / "job2", "n0")
    (entry,) = json.loads(announced(run))
    assert entry["labels"]["discovery"] == "http"
    assert entry["labels"]["job_id"] == "job"


@pytest.mark.parametrize(
    "entry", ['[{"targets": ["n1:9400"], "labels": null}]', '[{"targets": 1, "labels": []}]', '[{"labels": {"a": 1}}]']
)
def test_entry_that_is_not_ours_hides_no_other_one(entry: str, run: Path) -> None:
    announce(run, "n0")
    (run.parent / FOLDER / "job@@n1.json").write_text(entry)
    (ours,) = json.loads(announced(run))
    assert ours["targets"] == ["n0:9400"]


def test_announce_returns_false_if_the_folder_cannot_be_written(run: Path) -> None:
    (run.parent / FOLDER).write_text("no folder")
    assert not Targets(run, "n0").announce("n0:9400")
    assert announced(run) == b"[]"


def test_names_of_any_length_have_entries_of_their_own(tmp_path: Path) -> None:
    for ending in "ab":
        announce(tmp_path / ("j" * 199 + ending), "n" * 240 + ending)
    assert len(list((tmp_path / FOLDER).iterdir())) == 2
