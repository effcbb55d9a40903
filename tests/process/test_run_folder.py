"""The run folder cannot be made, or its disk is full: the job runs all the same, and the terminal says it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilience.facts import events
from tests.generate_docs import RUN_FILES
from tests.process.launching import Launched, launcher
from tests.process.test_faults import fault
from tests.support import disks
from tests.support.account import Account
from tests.support.ranks import Job

Launch = Callable[..., Launched]
SHOWS_ALL = """
import resilience
for step in range(3):
    with resilience.section("work"):
        resilience.step(step)
resilience.get_logger().info("done")
print("done", flush=True)
print("done", file=sys.stderr, flush=True)
"""


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    return launcher(start, tmp_path)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    with disks.mounted(tmp_path / "read-only", "ro") as folder:
        yield folder


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with disks.mounted(tmp_path / "small", "size=4m") as folder:
        yield folder


def test_read_only_folder_moves_the_records_elsewhere_and_the_terminal_says_where(
    launch: Launch, read_only: Path
) -> None:
    script = "sys.stdout.write(f'ran {rank}\\n')"  # the line in one piece
    job = launch(script, RESILIENCE_RUN_DIR=str(read_only / "runs"))
    assert job.wait() == [0], job.job.output()
    assert sorted(job.output().split("\n")) == ["", "ran 0", "ran 1"]
    said = job.output(stream=2)
    assert "Read-only file system" in said and str(read_only) in said
    place = re.search(r"records go to (\S+)", said)
    assert place is not None, said
    kept = Account(Path(place[1])).records()
    assert [record.event.outcome for record in kept if isinstance(record.event, events.JobEnded)] == ["completed"]


def test_run_folder_holds_the_files_that_stay_compatible(launch: Launch) -> None:
    job = launch(SHOWS_ALL, RESILIENCE_METRICS_PORT="0")
    assert job.wait() == [0], job.job.output()
    folder = job.account.folder
    nodes = "|".join(re.escape(node) for node in {record.origin.node for record in job.account.records()})
    placed = [re.sub(rf"(?<=/)({nodes})(?=[-.])", "<node>", file_in(folder, path)) for path in folder.rglob("*")]
    names = {
        re.sub(r"^output/\d+/\d+", "output/<cycle>/<rank>", re.sub(r"-\d+\.", "-<rank>.", name)) for name in placed
    }
    assert names - {""} == set(RUN_FILES)


def file_in(folder: Path, path: Path) -> str:
    return str(path.relative_to(folder)) if path.is_file() else ""


@pytest.mark.parametrize("place", ["/proc/nowhere", pytest.param("/dev/null/runs", marks=pytest.mark.slow)])
def test_folder_that_cannot_be_made_ends_no_job(launch: Launch, place: str) -> None:
    job = launch("print('ran', rank)", "--run-dir", place)
    assert job.wait() == [0], job.job.output()
    assert f"{place}" in job.output(stream=2)


def test_records_on_a_full_disk_end_no_job(launch: Launch, small: Path) -> None:
    disks.fill(small)
    job = launch("if cycle == 0 and rank == 0: sys.exit(1)", "--run-dir", str(small))
    assert job.wait() == [0], job.job.output()
    assert "disk" in job.output(stream=2)


def test_disk_with_too_little_room_is_warned_about_once(launch: Launch) -> None:
    job = launch("if cycle == 0 and rank == 0: sys.exit(1)", "--min-free-disk-mb", str(10**9))
    assert job.wait() == [0], job.job.output()
    assert [record.event.check for record in job.of(events.NodeWarned)] == ["disk"]
    assert job.output(stream=2).count("MiB free") == 1


def test_disk_with_too_little_room_excludes_the_node_if_that_is_asked_for(launch: Launch) -> None:
    job = launch("say('ran')", "--min-free-disk-mb", str(10**9), "--exclude-on-full-disk")
    assert job.wait() == [95]
    assert [record.event.check for record in job.of(events.NodeUnhealthy)] == ["disk"]
    assert not list(job.folder.glob("ran*"))


@pytest.mark.parametrize("is_full", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_disk_that_takes_no_run_folder_excludes_the_node_if_that_is_asked_for(
    launch: Launch, small: Path, is_full: bool
) -> None:
    disks.fill(small)
    job = launch("say('ran')", "--run-dir", str(small) if is_full else "/proc/nowhere", "--exclude-on-full-disk")
    assert job.wait() == [95], job.job.output()
    assert not list(job.folder.glob("ran*"))


def test_wrapper_without_the_launcher_runs_where_no_folder_can_be_made(
    start: Callable[..., Job], read_only: Path
) -> None:
    job = start(
        2,
        "tests.process.jobs:train",
        env={"RESILIENCE_RUN_DIR": str(read_only / "runs")},
        faults=[fault("exception")],
    )
    assert [rank.code for rank in job.wait_ranks(60.0)] == [0, 0], job.output()
