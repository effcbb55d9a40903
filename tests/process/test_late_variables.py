"""Variables that a program sets before it imports torch have the effect that they have in a fresh interpreter, or a
line at the terminal says that they have none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.facts import events
from resilience.launcher.worker.script_variables import is_read_at_import, is_read_by_numpy
from resilience.launcher.worker.zygote import PRELOADED
from tests.process.launching import Launched, launcher
from tests.support.ranks import Job
from tests.support.server import DDP_AND_FSDP

Launch = Callable[..., Launched]
READ = """
import importlib, json, sys
from resilience.launcher.worker.environment_reads import recorded
reads = {}
class Reads(dict):
    def __missing__(self, package):
        return self.setdefault(package, set())
reads = Reads()
with recorded(reads):
    for name in json.loads(sys.argv[1]):
        importlib.import_module(name)
print(json.dumps({package: sorted(names) for package, names in reads.items()}))
"""
# Cycle 0 fails. TORCH_LOGS shows whether it had an effect: torch makes a logger talk, which nobody else does.
SCRIPT = """
SETTING
import logging, torch
(here / f"level.{cycle}").write_text(str(logging.getLogger("torch._dynamo").getEffectiveLevel() <= logging.DEBUG))
sys.exit(3 if cycle == 0 else 0)
"""


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    return launcher(start, tmp_path)


def test_script_that_sets_a_variable_before_it_imports_torch_starts_cold(launch: Launch) -> None:
    job = launch(SCRIPT.replace("SETTING", "os.environ['TORCH_LOGS'] = '+dynamo'"), nproc=1)
    assert job.wait() == [0]
    started = [record.event for record in job.of(events.WorkerStarted)]
    assert [event.how for event in started] == ["cold", "cold"]
    assert all("sets TORCH_LOGS before torch is imported" in event.why_cold for event in started)
    assert [(job.folder / f"level.{cycle}").read_text() for cycle in (0, 1)] == ["True", "True"]
    assert job.of(events.VariablesTooLate) == []


@pytest.mark.parametrize("noted", [{}, pytest.param({"LATE": "yes"}, marks=pytest.mark.slow)], ids=["early", "late"])
def test_late_variable_with_a_computed_name_is_reported_and_next_cycle_starts_cold(
    launch: Launch, noted: dict[str, str]
) -> None:
    job = launch(SCRIPT.replace("SETTING", "os.environ['TORCH_' + 'LOGS'] = '+dynamo'"), nproc=1, **noted)
    assert job.wait() == [0]
    (late,) = (record.event for record in job.of(events.VariablesTooLate))
    assert (late.worker_rank, late.package, late.names) == (0, "torch", ("TORCH_LOGS",))
    assert [record.event.how for record in job.of(events.WorkerStarted)] == ["warm", "cold"]
    assert [(job.folder / f"level.{cycle}").read_text() for cycle in (0, 1)] == ["False", "True"]
    shown = job.output(stream=2)
    assert "rank 0 set TORCH_LOGS before it imported torch, but a warm worker imports torch in advance" in shown


def test_variable_that_a_package_sets_is_reported_like_one_of_the_script(launch: Launch, tmp_path: Path) -> None:
    """The package is not beside the script, so no source shows it before."""
    (tmp_path / "packages" / "settings_of_all").mkdir(parents=True)
    package = "import os\nos.environ['TORCH_LOGS'] = '+dynamo'\n"
    (tmp_path / "packages" / "settings_of_all" / "__init__.py").write_text(package)
    job = launch(SCRIPT.replace("SETTING", "sys.path.append(str(here / 'packages'))\nimport settings_of_all"), nproc=1)
    assert job.wait() == [0], job.job.output()
    (late,) = (record.event for record in job.of(events.VariablesTooLate))
    assert (late.package, late.names) == ("torch", ("TORCH_LOGS",))
    assert [record.event.how for record in job.of(events.WorkerStarted)] == ["warm", "cold"]


def test_variable_that_a_package_sets_past_os_environ_is_noticed_too(launch: Launch, tmp_path: Path) -> None:
    """By `os.putenv`, as libraries in C do: the variable is not in `os.environ`. A fresh torch reads it."""
    (tmp_path / "packages").mkdir()
    package = "import os\nos.putenv('OMP_NUM_THREADS', '2')\nos.putenv('TORCH_CPP_LOG_LEVEL', 'ERROR')\n"
    (tmp_path / "packages" / "settings_of_all.py").write_text(package)
    setting = "sys.path.append(str(here / 'packages'))\nimport settings_of_all"
    threads = "import torch\n(here / f'threads.{cycle}').write_text(str(torch.get_num_threads()))"
    job = launch(f"{setting}\n{threads}\nsys.exit(3 if cycle == 0 else 0)", nproc=1)
    assert job.wait() == [0], job.job.output()
    (late,) = (record.event for record in job.of(events.VariablesTooLate))
    assert (late.package, late.names) == ("torch", ("TORCH_CPP_LOG_LEVEL",))
    assert [record.event.how for record in job.of(events.WorkerStarted)] == ["warm", "cold"]
    assert [(job.folder / f"threads.{cycle}").read_text() for cycle in (0, 1)] == ["2", "2"]


def test_more_late_threads_than_cores_are_as_many_as_in_a_cold_worker(launch: Launch) -> None:
    """Torch with MKL uses at most as many threads as there are cores. TORCH_LOGS makes the second cycle cold."""
    setting = "os.environ['OMP_NUM_THREADS'] = '4096'\nos.environ['TORCH_' + 'LOGS'] = '+dynamo'"
    threads = "import torch\n(here / f'threads.{cycle}').write_text(str(torch.get_num_threads()))"
    job = launch(f"{setting}\n{threads}\nsys.exit(3 if cycle == 0 else 0)", nproc=1)
    assert job.wait() == [0], job.job.output()
    assert [record.event.how for record in job.of(events.WorkerStarted)] == ["warm", "cold"]
    warm, cold = [(job.folder / f"threads.{cycle}").read_text() for cycle in (0, 1)]
    assert warm == cold


def test_variable_that_is_set_after_the_import_keeps_workers_warm(launch: Launch) -> None:
    job = launch(
        "import torch\nos.environ['TORCH_' + 'LOGS'] = os.environ['OPEN' + 'BLAS_VERBOSE'] = '0'\n"
        "import torch.nn, numpy\nsys.exit(cycle == 0 and 3)",
        nproc=1,
    )
    assert job.wait() == [0]
    assert [record.event.how for record in job.of(events.WorkerStarted)] == ["warm", "warm"]
    assert job.of(events.VariablesTooLate) == []


@pytest.mark.slow  # it changes with the pin of torch only
def test_every_variable_that_is_read_at_the_import_of_torch_is_known() -> None:
    command = [sys.executable, "-c", READ, json.dumps([*PRELOADED, *DDP_AND_FSDP])]
    done = subprocess.run(command, capture_output=True, timeout=145, check=True)
    reads: dict[str, list[str]] = json.loads(done.stdout)
    assert "TORCH_LOGS" in reads["torch"]
    at_the_start = subprocess.run(
        [*command[:-1], json.dumps(PRELOADED)], capture_output=True, timeout=145, check=True
    ).stdout
    unknown = [
        name
        for package in ("torch", "numpy")
        for name in json.loads(at_the_start)[package]
        if not is_read_at_import(name)
    ]
    assert unknown == []
    assert [name for name in json.loads(at_the_start)["numpy"] if not is_read_by_numpy(name)] == []
