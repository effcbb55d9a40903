"""`resilience demo` as a person meets it, and what it stands on: a training that repeats bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.demo import ranks
from resilience.report.condensed import report
from resilience.run_folder.load import load, runs_in
from tests.process.leftovers import processes_of
from tests.support.ranks import Job

COMMAND = [sys.executable, "-m", "resilience.cli", "demo"]


def _demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, RESILIENCE_RUN_DIR=str(folder), PYTHONIOENCODING="utf-8")
    return subprocess.run([*COMMAND, *arguments], env=env, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.slow
def test_job_goes_on_after_three_kinds_of_faults_and_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    done = _demo(tmp_path, "--keep", "--steps=45", "--fault=exception@12:1", "--fault=kill@23:2", "--fault=hang@37:0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parameters are equal bit for bit" in done.stdout
    assert "FAILED" not in done.stdout
    (folder,) = runs_in(tmp_path)
    found = report(load(folder))
    told = [
        (culprit.rank, culprit.what, None if incident.where is None else (incident.where.function, incident.where.line))
        for incident in found.incidents
        for culprit in incident.verdict.culprits
    ]
    # On a busy machine a slow rank may be taken for one that hangs, which is an incident of its own.
    assert (1, "exception", ("_strike", line_of("raise ValueError("))) in told
    assert (2, "killed", None) in told
    assert (0, "input_stall", ("_strike", line_of("threading.Event().wait()"))) in told
    assert found.lost == (2,)
    assert found.completed == (0, 1, 3, 4)
    assert not processes_of(tmp_path)


def line_of(text: str) -> int:
    """Return the number of the one line of the demonstration's faults that holds a text."""
    source = Path(ranks.__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(source, start=1) if text in line)
    return number


@pytest.mark.slow  # .ci/run runs the demonstration too
def test_nothing_stays_without_keep(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = dict(os.environ, RESILIENCE_RUN_DIR=str(tmp_path / "runs"), TMPDIR=str(temporary))
    arguments = ["--ranks=2", "--steps=20", "--fault=none"]
    done = subprocess.run([*COMMAND, *arguments], env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["temporary"]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ending_it_early_leaves_no_process_and_no_folder(tmp_path: Path, number: int) -> None:
    env = dict(os.environ, RESILIENCE_RUN_DIR=str(tmp_path), TMPDIR=str(tmp_path))
    with subprocess.Popen([*COMMAND, "--steps=100000"], env=env, stdout=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout is not None
            assert any("loss" in line for line in demo.stdout)  # the ranks train
            demo.send_signal(number)
            rest = demo.stdout.read()
            assert demo.wait(60) == 130
        finally:
            demo.kill()
    assert "all processes were stopped" in rest
    assert not processes_of(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argument", "allowed"),
    [("--ranks=1", "2 to 16"), ("--steps=3", "20 to 100000"), ("--fault=fire", "exception, kill, hang")],
)
def test_wrong_argument_is_answered_with_what_is_allowed(tmp_path: Path, argument: str, allowed: str) -> None:
    done = _demo(tmp_path, argument)
    assert done.returncode == 2
    assert allowed in done.stderr
    assert not list(tmp_path.iterdir())


def test_training_repeats_bit_for_bit_also_across_a_damaged_checkpoint(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    target = "tests.process.demo_jobs:train_to"
    whole = start(2, target, steps=12, folder=str(tmp_path / "whole"))
    straight = {finished.value for finished in whole.wait_ranks()}
    start(2, target, steps=8, folder=str(tmp_path / "parts")).wait_ranks()
    newest = max((tmp_path / "parts").glob("*.ckpt"))
    newest.write_bytes(newest.read_bytes()[:-1000])
    resumed = {finished.value for finished in start(2, target, steps=12, folder=str(tmp_path / "parts")).wait_ranks()}
    assert len(straight) == 1  # both ranks hold the same
    assert resumed == straight
