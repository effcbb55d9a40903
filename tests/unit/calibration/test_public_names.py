"""What users import from `resilience.calibration` reads runs and calculates their limits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from resilience.calibration import Deadline, Target, Timeouts, calibrate, read
from resilience.errors import ConfigurationError


def table(path: Path, runs: int = 2, steps: int = 12_000) -> Path:
    """Write steps of about 2 s as a table of durations."""
    chance = random.Random(1)
    rows = [
        f"{run},step,0,{i},{2.0 * chance.lognormvariate(0.0, 0.02):.6f}" for run in range(runs) for i in range(steps)
    ]
    path.write_text("\n".join(["run,section,rank,i,seconds", *rows, ""]))
    return path


def test_runs_that_were_read_have_a_limit_of_each_deadline(tmp_path: Path) -> None:
    timeouts = calibrate(read([table(tmp_path / "steps.csv")]))
    assert isinstance(timeouts, Timeouts)
    usual = timeouts.deadlines["step"]
    assert isinstance(usual, Deadline)
    assert (usual.status, usual.runs) == ("ok", 2)
    assert usual.timeout_s is not None and usual.timeout_s > usual.max_s


def test_target_bounds_the_limit(tmp_path: Path) -> None:
    timeouts = calibrate(read([table(tmp_path / "steps.csv")]), Target(min_timeout=60.0))
    assert timeouts.deadlines["step"].timeout_s == 60.0


def test_only_the_named_sections_are_read(tmp_path: Path) -> None:
    path = table(tmp_path / "steps.csv")
    with path.open("a") as file:
        file.write("0,save,0,0,9.0\n1,save,0,0,9.0\n")
    assert {name for run in read([path], frozenset({"step"})).runs for name in run.deadlines} == {"step"}
    assert {name for run in read([path]).runs for name in run.deadlines} == {"save", "step"}


def test_earlier_limits_are_merged(tmp_path: Path) -> None:
    earlier = calibrate(read([table(tmp_path / "steps.csv")]), Target(min_timeout=60.0))
    merged = calibrate(read([table(tmp_path / "steps.csv")]), previous=earlier)
    assert merged.deadlines["step"].previous_timeout_s == 60.0


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"gone\.csv"):
        read([tmp_path / "gone.csv"])
