"""The examples, each as its header says to run it, shorter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from resilience.report.condensed import Report, report
from resilience.run_folder.load import load, runs_in
from tests.process.leftovers import left_after

EXAMPLES = Path(__file__).parents[2] / "examples"
WRAPPED = ("01_wrap_main.py", "02_build_outside.py", "03_reserve_ranks.py")
LAUNCH = [sys.executable, str(EXAMPLES / "launch.py"), "--nproc"]
RUN = [sys.executable, "-m", "resilience.launcher"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


class Done:
    """What a run printed: its last loss by step and world size, and the account it left."""

    def __init__(self, folder: Path, done: subprocess.CompletedProcess[str]) -> None:
        self.status = done.returncode
        self.output = done.stdout + done.stderr
        self.steps = [
            (int(step), int(ranks), loss)
            for step, ranks, loss in re.findall(r"step (\d+) of (\d+) ranks: loss (\S+)", done.stdout)
        ]
        self._folder = folder

    @property
    def report(self) -> Report:
        (run,) = runs_in(self._folder / "runs")
        return report(load(run))


def _run(folder: Path, launcher: list[str], ranks: int, script: str, fault: str = "") -> Done:
    command = [*launcher, str(ranks), str(EXAMPLES / script), "--steps=14", f"--checkpoints={folder / 'checkpoints'}"]
    if fault:
        command.append(f"--fault={fault}")
    env = dict(os.environ, RESILIENCE_RUN_DIR=str(folder / "runs"), OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=270, check=False)
    assert not left_after(folder / "runs")
    return Done(folder, done)


@pytest.mark.slow
def test_plain_script_trains_and_ends_at_a_fault(tmp_path: Path) -> None:
    broken = _run(tmp_path, LAUNCH, 2, "00_plain.py", "exception@12:1")
    assert broken.status == 1, broken.output
    assert broken.steps[-1][0] < 13
    again = _run(tmp_path, LAUNCH, 2, "00_plain.py", "exception@12:1")  # as a scheduler starts it again
    assert again.status == 0, again.output
    assert (again.steps[0][0], again.steps[-1][0]) == (10, 13)


@pytest.mark.parametrize(
    "script", [WRAPPED[0], *(pytest.param(script, marks=pytest.mark.slow) for script in WRAPPED[1:])]
)
@pytest.mark.parametrize(
    "launcher", [LAUNCH, pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["plain", "torchrun"]
)
def test_wrapped_script_goes_on_after_an_exception(tmp_path: Path, script: str, launcher: list[str]) -> None:
    spares = script.startswith("03")
    done = _run(tmp_path, launcher, 2 + spares, script, "exception@12:1")
    assert done.status == 0, done.output
    assert [step for step, _, _ in done.steps[-4:]] == [10, 11, 12, 13]  # from the checkpoint on, to the end
    assert {ranks for _, ranks, _ in done.steps} == {2}
    (incident,) = done.report.incidents
    assert (incident.kind, incident.verdict.first) == ("exception", 1)


@pytest.mark.slow
def test_lost_rank_makes_the_world_smaller(tmp_path: Path) -> None:
    done = _run(tmp_path, LAUNCH, 3, "02_build_outside.py", "kill@12:1")
    assert done.status == 0, done.output
    assert [(step, ranks) for step, ranks, _ in done.steps[-4:]] == [(10, 2), (11, 2), (12, 2), (13, 2)]
    assert done.report.lost == (1,)


@pytest.mark.slow
def test_spare_takes_the_place_of_a_lost_rank_and_the_losses_stay_the_same(tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    undisturbed = _run(tmp_path / "undisturbed", LAUNCH, 2, "00_plain.py")
    done = _run(tmp_path, LAUNCH, 3, "03_reserve_ranks.py", "kill@12:1")
    assert done.status == 0, done.output
    assert done.steps[-4:] == undisturbed.steps[-4:]
    (incident,) = done.report.incidents
    assert incident.stepped_in == (2,)


HEARTBEATS = [*RUN, "--ft-rank-heartbeat-timeout", "5"]
SECTIONS = [*RUN, "--ft-rank-section-timeouts", "setup:60,step:5,checkpoint:60", "--ft-safety-factor", "20"]


@pytest.mark.parametrize(
    ("launcher", "script"),
    [
        pytest.param(HEARTBEATS, "heartbeats.py", marks=pytest.mark.slow),
        pytest.param(SECTIONS, "sections.py", marks=pytest.mark.slow),
    ],
)
def test_hung_rank_is_replaced_by_the_launcher(tmp_path: Path, launcher: list[str], script: str) -> None:
    done = _run(tmp_path, [*launcher, "--nproc-per-node"], 2, script, "hang@12:1")
    assert done.status == 0, done.output
    assert [(step, ranks) for step, ranks, _ in done.steps[-4:]] == [(10, 2), (11, 2), (12, 2), (13, 2)]
    (incident,) = done.report.incidents
    assert (incident.kind, incident.layer) == ("hard_timeout", "launcher")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cycles"), [pytest.param("exception@12:1", 1, marks=pytest.mark.slow), ("kill@12:1", 2)]
)
def test_launcher_takes_over_where_the_wrapper_cannot(tmp_path: Path, fault: str, cycles: int) -> None:
    launcher = [*RUN, "--ft-restart-policy", "min-healthy", "--nproc-per-node"]
    done = _run(tmp_path, launcher, 2, "launcher_with_wrapper.py", fault)
    assert done.status == 0, done.output
    assert [(step, ranks) for step, ranks, _ in done.steps[-4:]] == [(10, 2), (11, 2), (12, 2), (13, 2)]
    launched = done.report.launched
    assert launched is not None and launched.cycles == cycles
    assert done.report.iterations == 2
