"""A node whose wall clock is wrong: its lines stand where they belong, and it is said by how much they were moved.

The clock is shifted for all Python processes of that node, by a module that they import as they start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilience.facts.in_words import seconds
from resilience.run_folder.merge import clocks_of
from tests.support.agents import run_job
from tests.support.server import ROOT

pytestmark = pytest.mark.timeout(900)  # together they may take longer than 300 s on a busy machine

AHEAD = 90  # seconds; longer than anything here takes
SHIFTED = f"""
import time
for name, more in (("time", {AHEAD}), ("time_ns", {AHEAD} * 10**9)):
    setattr(time, name, lambda now=getattr(time, name), more=more: now() + more)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of two nodes under the launcher in which rank 1, on the node with the wrong clock, fails once."""
    folder = tmp_path_factory.mktemp("clocks")
    (folder / "shifted").mkdir()
    (folder / "shifted" / "sitecustomize.py").write_text(SHIFTED)

    def paths(node: str) -> dict[str, str]:
        shifted = [str(folder / "shifted")] if node == "b" else []
        return {"PYTHONPATH": os.pathsep.join([str(ROOT), *shifted])}

    return run_job(folder, "logging_train.py", 2, 1, {}, paths)


def told(folder: Path, *arguments: str) -> tuple[str, str]:
    command = [sys.executable, "-m", "resilience.cli", arguments[0], str(folder), *arguments[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True)
    return done.stdout, done.stderr


def entries(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told(folder, "logs", "--json", *arguments)[0].splitlines()]


def test_the_difference_lies_within_the_uncertainty_that_is_reported(run: Path) -> None:
    first, second = clocks_of(run)
    assert (first.node, first.offset_ns, second.node) == ("a", 0, "b")
    assert second.meetings >= 3  # the rendezvous and each start of an iteration
    assert second.uncertainty_ns is not None
    assert abs(second.offset_ns - AHEAD * 10**9) <= second.uncertainty_ns


def test_lines_are_in_the_order_in_which_things_happened(run: Path) -> None:
    (raised,) = entries(run, "--event", "rank.interrupted", "--rank", "1")
    restarted = [entry for entry in entries(run, "--event", "iteration.started") if entry["iteration"] == 1]
    assert sorted(entry["node"] for entry in restarted) == ["a", "b"]
    for entry in restarted:
        assert raised["ts"] < entry["ts"]
    assert raised["clock_offset_s"] == pytest.approx(AHEAD, abs=raised["clock_uncertainty_s"])
    notes = told(run, "logs")[1]
    assert f"clock of b was {seconds(raised['clock_offset_s'])} ± " in notes
    assert "ahead; corrected" in notes
    assert "2 nodes: their clocks agree to within" in notes


def test_restart_and_trace_are_not_longer_for_it(run: Path) -> None:
    restart = json.loads(told(run, "trace", "--json")[0])
    assert restart["uncertainty_s"] < AHEAD
    assert restart["seconds"] == pytest.approx(sum(step["seconds"] for step in restart["path"]))
    assert restart["seconds"] < AHEAD
    assert "Clocks of two nodes may differ by" in told(run, "trace")[0]
    shown = json.loads(told(run, "trace", "--format", "perfetto")[0])["traceEvents"]
    restarts = [event for event in shown if event["name"] == "restart"]
    assert {event["pid"] for event in restarts} == {1, 2}
    begins = [event["ts"] / 1e6 for event in restarts]
    assert max(begins) - min(begins) < AHEAD
