"""Limits from within a job: the fit of all runs so far of its configuration."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path

import pytest

from resilience.calibration.fitting import Timeout
from resilience.calibration.pool import Pool
from resilience.facts.configuration import Configuration
from resilience.monitor import refit
from resilience.telemetry.durations import Durations, Header, Recorder


def record(
    folder: Path,
    run: str,
    began: float,
    n: int = 15_000,
    script: str = "train.py",
    first: float = 0.0,
    node: str = "host",
    seconds: float = 2.0,
    spread: float = 0.02,
) -> None:
    chance = random.Random(run)
    configuration = Configuration(script, world_size=1)
    header = Header(run=run, node=node, rank=0, world_size=1, configuration=configuration)
    recorder = Recorder(folder / run, header, began)
    if first:
        recorder.add("train", first, began)
    for i in range(n):
        recorder.add("train", seconds * math.exp(chance.gauss(0.0, spread)), began + 2.0 * i)
    recorder.add("save", 30.0, began)
    recorder.close(began + 2.0 * n)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RESILIENCE_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("RESILIENCE_JOB_ID", "today")
    return tmp_path


def test_two_runs_of_a_configuration_give_a_limit_where_a_rate_can_be_stated(runs: Path) -> None:
    record(runs, "yesterday", 0.0)
    record(runs, "today", 1e6)
    found = refit.limits(None, 1, 0, pytest.fail)
    assert set(found) == {"train"}  # one checkpoint a run supports none
    assert 3.0 < found["train"] < 6.0
    assert refit.limits(["save"], 1, 0, pytest.fail) == {}


def test_slow_first_step_does_not_lengthen_the_limit(runs: Path) -> None:
    record(runs, "yesterday", 0.0, first=100.0)
    record(runs, "today", 1e6, first=100.0)
    assert 3.0 < refit.limits(None, 1, 0, pytest.fail)["train"] < 6.0


def test_rank_that_a_restart_moved_counts_on_all_its_nodes(runs: Path) -> None:
    for run, began in (("yesterday", 0.0), ("today", 1e6)):
        for number in range(3):
            record(runs, run, began + 1e5 * number, n=4_000, node=f"host{number}")
    assert set(refit.limits(None, 1, 0, pytest.fail)) == {
        "train"
    }  # 12,000 durations of each run are enough, 4,000 are not


def test_nodes_of_a_run_do_not_count_as_runs(runs: Path) -> None:
    record(runs, "yesterday", 0.0)
    for number in range(refit.MOST_RUNS):
        record(runs, "today", 1e6 + 1e5 * number, n=3_000, node=f"host{number}")
    assert set(refit.limits(None, 1, 0, pytest.fail)) == {"train"}


def test_one_run_alone_gives_none_for_it_may_be_special(runs: Path) -> None:
    record(runs, "today", 0.0, n=30_000)
    assert refit.limits(None, 1, 0, pytest.fail) == {}


def test_runs_of_another_configuration_do_not_count(runs: Path) -> None:
    record(runs, "yesterday", 0.0, script="other.py")
    record(runs, "today", 1e6)
    assert refit.limits(None, 1, 0, pytest.fail) == {}


def test_newest_runs_of_a_configuration_are_read_and_older_ones_are_not(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"day{number}" for number in range(refit.MOST_RUNS + 2)]
    for number, name in enumerate([*names, "today"]):
        record(runs, name, float(number), n=1)
        os.utime(runs / name / "timings", (1e6 + number, 1e6 + number))
    read: set[str] = set()
    read_histograms = refit.read_histograms
    monkeypatch.setattr(refit, "read_histograms", lambda path: read.add(path.parts[-3]) or read_histograms(path))
    refit.limits(None, 1, 0, pytest.fail)
    assert read == {"today", *names[-refit.MOST_RUNS + 1 :]}


def test_reading_of_many_runs_on_a_slow_disk_ends_with_its_time(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it any longer."""
    record(runs, "today", 0.0, n=1)
    for number in range(20):
        record(runs, f"day{number}", 0.0, n=1, script="other.py")
    monkeypatch.setattr(refit, "time", SlowDisk)
    read_histograms, read = refit.read_histograms, []

    def slow(path: Path) -> Durations:
        read.append(path)
        SlowDisk.now += refit.READ_LIMIT / 3
        return read_histograms(path)

    monkeypatch.setattr(refit, "read_histograms", slow)
    assert refit.limits(None, 1, 0, pytest.fail) == {}
    assert len(read) == 4


class SlowDisk:
    """The time that a slow disk lets pass."""

    now = 0.0

    @classmethod
    def monotonic(cls) -> float:
        return cls.now


def test_without_a_run_folder_there_is_nothing_to_fit(runs: Path) -> None:
    assert refit.limits(None, 1, 0, pytest.fail) == {}
    (runs / "today" / "timings").mkdir(parents=True)
    (runs / "today" / "timings" / "host-0.hist").write_text("torn {")
    assert refit.limits(None, 1, 0, pytest.fail) == {}


@pytest.mark.parametrize(("steps", "is_enough"), [(36, False), (15_000, True)])
def test_rate_needs_as_many_occurrences_with_many_ranks_as_with_one(
    runs: Path, monkeypatch: pytest.MonkeyPatch, steps: int, is_enough: bool
) -> None:
    """512 ranks take part in each step, so 36 steps are 18,432 durations."""
    ranks = 512
    record(runs, "yesterday", 0.0, n=steps)
    record(runs, "today", 1e6, n=steps)

    def of_all(buckets: dict[str, dict[int, int]], size: int) -> dict[str, dict[int, int]]:
        return {name: {number: count * ranks for number, count in own.items()} for name, own in buckets.items()}

    monkeypatch.setattr(refit.rank_reductions, "sums_over_ranks", of_all)
    assert ("train" in refit.limits(None, ranks, 0, pytest.fail)) == is_enough


def test_run_that_has_just_begun_gives_none(runs: Path) -> None:
    recorder = Recorder(runs / "today", Header(run="today", node="host", rank=0, world_size=1), 5.0)
    recorder.add("train", 0.001, 5.0)
    recorder.close(5.0)
    assert refit.limits(None, 1, 0, pytest.fail) == {}


def test_fit_that_fails_is_reported_and_the_other_sections_have_limits(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(runs, "yesterday", 0.0)
    record(runs, "today", 1e6)
    fit_pool = refit.fit_pool

    def failing(pool: Pool, p: float, per_occurrence: int) -> Timeout:
        if not pool.descending:  # each run has one `save`, its first
            raise OverflowError("math range error")
        return fit_pool(pool, p, per_occurrence=per_occurrence)

    monkeypatch.setattr(refit, "fit_pool", failing)
    failures = []
    limits = refit.limits(None, 1, 0, lambda deadline, error: failures.append((deadline, str(error))))
    assert (set(limits), failures) == ({"train"}, [("save", "math range error")])


def test_runs_of_different_speed_give_none(runs: Path) -> None:
    record(runs, "yesterday", 0.0, n=600, seconds=1.0, spread=0.001)
    record(runs, "today", 1e6, n=600, spread=0.001)
    assert refit.limits(None, 1, 0, pytest.fail) == {}
