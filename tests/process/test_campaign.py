"""The campaign through its command: a case is run, its truth is written before, and it is not run twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def campaign(out: Path, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.campaign", "--cases", "1", "--worlds", "2", "--out", str(out), *options],
        capture_output=True,
        timeout=240,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
def test_case_is_run_once_and_scored(tmp_path: Path) -> None:
    assert "[####################] 1/1 ok" in campaign(tmp_path)
    (line,) = (tmp_path / "results.jsonl").read_text().splitlines()
    outcome = json.loads(line)
    assert (outcome["recovered"], outcome["is_equal"], outcome["orphans"]) == (True, True, 0)
    told = campaign(tmp_path, "--resume")
    assert "1 of them done" in told and "1/1" not in told
    assert (tmp_path / "results.jsonl").read_text().splitlines() == [line]
