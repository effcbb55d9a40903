"""Real frameworks under `resilience run`, two gloo ranks: a fault, and the training goes on at the last checkpoint."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.facts import events
from resilience.integrations.stored_limits import FILE
from tests.process.launching import launcher
from tests.process.leftovers import left_after
from tests.support.account import Account
from tests.support.ranks import Job
from tests.support.server import ROOT

pytestmark = pytest.mark.slow

SCRIPTS = ROOT / "tests" / "process" / "scripts"
NEEDS = {
    "lightning_digits.py": ("lightning", "sklearn"),
    "transformers_gpt2.py": ("transformers", "accelerate"),
}
STEPS = 40
LAST_CHECKPOINT = 20  # before the fault


class Trained:
    """A job that ran to its end."""

    def __init__(self, folder: Path, script: str, fault: str = "") -> None:
        for module in NEEDS[script]:
            pytest.importorskip(module, reason=f"{module} is not installed: `poe install-frameworks`")
        self.folder = folder
        env = {
            **os.environ,
            "RESILIENCE_RUN_DIR": str(folder / "runs"),
            "RESILIENCE_JOB_ID": "job",
            "FAULT_TOL_FINISHED_FLAG_FILE": str(folder / "finished"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        # A hundred times the longest: steps of some milliseconds are no measure of how long a loaded host pauses.
        command = [sys.executable, "-m", "resilience.launcher", "--nproc-per-node", "2", "--ft-safety-factor", "100"]
        command += [str(SCRIPTS / script), str(folder / "out"), fault]
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        self.output = done.stdout + done.stderr
        assert not left_after(folder / "runs")
        assert done.returncode == 0, self.output
        self.records = Account(folder / "runs" / "job").records()

    def printed(self, words: str) -> list[str]:
        """What rank 0 printed after these words, in order."""
        return re.findall(rf"^{words} (\S+)$", self.output, flags=re.MULTILINE)

    @property
    def limits(self) -> set[str]:
        """What ranks were found to exceed."""
        found = [record.event for record in self.records if isinstance(record.event, events.RankFellSilent)]
        return {event.limit for event in found}


@functools.cache
def undisturbed(script: str, folder: Path) -> Trained:
    folder.mkdir(exist_ok=True)  # by a test that was skipped then
    return Trained(folder, script)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["crash", "kill", "hang"])
@pytest.mark.parametrize("script", NEEDS)
def test_training_resumes_at_the_last_checkpoint_as_if_nothing_had_been(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, script: str, fault: str
) -> None:
    expected = undisturbed(script, tmp_path_factory.getbasetemp() / script)
    assert expected.printed("starts at step") == ["0"]
    trained = Trained(tmp_path, script, fault)
    assert trained.printed("fault:") == [fault]
    assert trained.printed("starts at step") == ["0", str(LAST_CHECKPOINT)]
    assert trained.printed("ends at step") == [str(STEPS)]
    assert trained.printed("weights") == expected.printed("weights")
    assert trained.limits == ({"section:step"} if fault == "hang" else set())
    assert (tmp_path / "finished").exists()
    kept = json.loads((tmp_path / "out" / FILE).read_text())["limits"]
    assert set(kept["section_timeouts"]["section"]) == {"checkpoint", "setup", "step", "validation"}
    for limits in (kept["hb_timeouts"]["were_calculated"], kept["section_timeouts"]["is_out_of_section_calculated"]):
        assert limits is (script == "lightning_digits.py")  # a Trainer of transformers works after its last section


def test_lightning_is_not_preloaded_because_it_keeps_the_local_rank_of_its_import(tmp_path: Path) -> None:
    """docs/launcher.md says so. Where this fails, a newer Lightning may be fit to be preloaded."""
    pytest.importorskip("lightning", reason="lightning is not installed: `poe install-frameworks`")
    script = tmp_path / "script.py"
    script.write_text("print('trained')\n")
    done = subprocess.run(
        [sys.executable, "-m", "resilience.cli", "run", "--preload", "lightning", "--max-restarts", "0", str(script)],
        env={**os.environ, "RESILIENCE_RUN_DIR": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "lightning cannot be preloaded (torchmetrics reads LOCAL_RANK at its import" in done.stderr


# How much code of transformers runs in a worker? In cycle 0 the test lets the workers fail.
IMPORTS_TRANSFORMERS = """
executed = []
def watch(event, arguments):
    if event == "exec" and "/transformers/" in arguments[0].co_filename:
        executed.append(arguments[0].co_filename)
sys.addaudithook(watch)
from transformers import GPT2Config, GPT2LMHeadModel
(here / f"executed.{cycle}.{rank}").write_text(str(len(executed)))
say("up")
await_file("go")
GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))
sys.exit(3 if cycle == 0 else 0)
"""


def test_transformers_that_workers_have_imported_is_there_in_the_next_cycle(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: `poe install-frameworks`")
    job = launcher(start, tmp_path)(IMPORTS_TRANSFORMERS)
    for rank in range(2):
        job.await_worker(f"up.0.{rank}", 100.0)
    job.await_record(events.ModulesPreloaded, where=lambda event: "transformers" in event.modules)
    (job.folder / "go").touch()
    assert job.wait(100.0) == [0]
    executed = {cycle: [int((job.folder / f"executed.{cycle}.{r}").read_text()) for r in (0, 1)] for cycle in (0, 1)}
    assert min(executed[0]) > 20
    assert executed[1] == [0, 0]
