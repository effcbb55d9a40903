"""Limits learned for another number of ranks, and for the first occurrences after each kind of start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from resilience.calibration.limits_file import Timeouts
from resilience.cli import main
from resilience.facts import events
from resilience.system import timeouts_file
from tests.process.launching import NO_NODE_IS_LOST, Launched, launcher
from tests.support.ranks import Job

Launch = Callable[..., Launched]
UNHURRIED = ("--min-timeout", "5s")  # a healthy rank may get no processor for a second on a busy machine
TWO_NODES: dict[str, Any] = {"nodes": "2", "nproc": 1, "agents": 2, "conf": NO_NODE_IS_LOST}


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    return launcher(start, tmp_path)


def calibrated(tmp_path: Path, *runs: str, options: Sequence[str] = ()) -> Timeouts:
    """Calibrate runs, as a user would type it, and return the limits in `timeouts.yaml` of the run directory.

    A few runs give no rate, so the exit status is 3, or 4 for a deadline with fewer than 30 occurrences."""
    out = tmp_path / "runs" / "timeouts.yaml"
    folders = [str(tmp_path / "runs" / name) for name in runs]
    assert main(["calibrate", *folders, "--out", str(out), *options]) in (3, 4)
    return timeouts_file.read(out)


def silences(job: Launched) -> list[tuple[int | None, str, float]]:
    """Return the cycle, the limit and its length of each rank that a limit ended."""
    return [
        (record.origin.cycle, record.event.limit, record.event.allowed_s) for record in job.of(events.RankFellSilent)
    ]


STEPS = """
import resilience
for n in range(60):
    resilience.step(n)
    if (cycle, rank, n) == (0, 1, 40) and (here / "hang").exists():
        time.sleep(600)
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_limits_of_one_rank_hold_in_a_job_of_two_nodes_if_ranks_says_so(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "runs" / "timeouts.yaml")
    assert launch(STEPS, nproc=1, RESILIENCE_JOB_ID="one").wait() == [0]
    calibrated(tmp_path, "one", options=UNHURRIED)
    refused = launch(STEPS, "--timeouts", file, RESILIENCE_JOB_ID="refused", **TWO_NODES)
    assert refused.wait() == [2, 2]
    assert "limits hold for 1 rank; calibrate with --ranks 2" in refused.output(stream=2)
    for_two = calibrated(tmp_path, "one", options=("--ranks", "2", *UNHURRIED))
    assert (for_two.ranks, for_two.configuration.world_size) == (2, 1)
    capsys.readouterr()
    (tmp_path / "hang").touch()
    job = launch(STEPS, "--timeouts", file, RESILIENCE_JOB_ID="two", **TWO_NODES)
    assert job.wait() == [0, 0]
    assert job.of(events.TimeoutsUnlearned) == []
    assert silences(job) == [(0, "step", pytest.approx(for_two.deadlines["step"].timeout_s, rel=1e-4))]


def test_run_of_two_nodes_gives_limits_for_its_own_ranks_and_for_more(launch: Launch, tmp_path: Path) -> None:
    file = str(tmp_path / "runs" / "timeouts.yaml")
    assert launch(STEPS, RESILIENCE_JOB_ID="recorded", **TWO_NODES).wait() == [0, 0]
    for_two = calibrated(tmp_path, "recorded", options=("--ranks", "2", *UNHURRIED))
    assert (for_two.ranks, for_two.configuration.world_size) == (2, 2)
    assert {known.ranks for known in for_two.deadlines.values()} == {2}
    job = launch(STEPS, "--timeouts", file, RESILIENCE_JOB_ID="later", **TWO_NODES)
    assert job.wait() == [0, 0]
    assert silences(job) == [] and job.of(events.TimeoutsUnlearned) == []
    for_four = calibrated(tmp_path, "recorded", options=("--ranks", "4", *UNHURRIED))
    assert for_four.ranks == 4
    by_two, by_four = (
        made.deadlines["step"].expected_false_alarms_per_month.distribution_free_upper for made in (for_two, for_four)
    )
    assert by_two is not None and by_four == pytest.approx(2 * by_two, rel=1e-4)


RESTARTED = """
import resilience
for n in range(60):
    resilience.step(n)
    with resilience.section("train"):
        if n == 0:
            if (cycle, rank) == (1, 1) and (here / "hang").exists():
                time.sleep(600)
            time.sleep(1.5 if cycle else 6.0)
        if (cycle, rank, n) == (0, 1, 30):
            sys.exit(1)
        time.sleep(0.01)
"""


@pytest.mark.slow
def test_hang_in_the_first_step_after_a_restart_ends_by_the_limit_of_warm_starts(
    launch: Launch, tmp_path: Path
) -> None:
    """The first step takes 6 s after a cold start and 1.5 s after a warm one; five times each is its limit."""
    for name in ("first", "second"):
        assert launch(RESTARTED, RESILIENCE_JOB_ID=name).wait() == [0]
    limits = calibrated(tmp_path, "first", "second", options=UNHURRIED).deadlines
    for name in ("step", "train"):
        usual, cold, warm = (limits[f"{name}{kind}"] for kind in ("", ".first", ".first.warm"))
        assert usual.max_s < 6.0 <= cold.max_s
        assert 1.5 <= warm.max_s < 6.0
        assert cold.timeout_s == pytest.approx(5 * cold.max_s, rel=1e-3)
        assert warm.timeout_s == pytest.approx(max(5 * warm.max_s, usual.timeout_s or 0.0), rel=1e-3)
        assert warm.timeout_s is not None and warm.timeout_s < 30.0
    (tmp_path / "hang").touch()
    job = launch(RESTARTED, "--timeouts", "auto", RESILIENCE_JOB_ID="third")
    assert job.wait() == [0]
    ((cycle, limit, allowed_s),) = silences(job)
    deadline = {"step": "step.first.warm", "section:train": "train.first.warm"}[limit]
    assert (cycle, allowed_s) == (1, pytest.approx(limits[deadline].timeout_s, rel=1e-4))
