"""A job whose texts try to steer the terminal, and whose command line holds secrets."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from resilience.facts import events
from resilience.run_folder.load import load, runs_in
from tests.process.leftovers import left_after
from tests.support.hostile import HOSTILE, LEGITIMATE, NAME, obeyed

pytestmark = pytest.mark.timeout(900)  # waits of minutes for a slow machine
SECRET = "s3cr3t-v4lue"
SCRIPT = f"""
import os
import resilience

resilience.get_logger().warning({HOSTILE!r}, **{{{HOSTILE!r}: {HOSTILE!r}}})
client = resilience.fault_tolerance.RankMonitorClient()
client.init_workload_monitoring()
client.start_section({HOSTILE!r})
if os.environ["RANK"] == "1":
    raise ValueError({HOSTILE!r})
while True:
    client.send_heartbeat()
"""
ARGUMENTS = ["--hf-token", SECRET, f"--api-key={SECRET}", f"DB_PASSWORD={SECRET}", "--tokenizer", "bpe"]
SHOWN = ("--hf-token", "***", "--api-key=***", "DB_PASSWORD=***", "--tokenizer", "bpe")


def test_job_shows_hostile_text_as_escapes_and_keeps_no_secret(tmp_path: Path) -> None:
    script = tmp_path / NAME / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    runs = script.parent / "runs"
    command = [sys.executable, "-m", "resilience.cli", "run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--redirects", "3", "--log-dir", str(tmp_path / "logs")]  # the workers' own output is theirs
    command += ["--health-check", f"test HF_TOKEN={SECRET} != -"]
    command += ["--run-dir", str(runs), "--rdzv-id", NAME, str(script), *ARGUMENTS, HOSTILE.replace("\0", "")]
    env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", RESILIENCE_NODE=f"n {NAME}")
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, timeout=240, check=False)
    shown = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 1, shown
    assert not left_after(runs)
    assert shown.count("pwned") > 2
    assert LEGITIMATE in shown
    assert not obeyed(shown)
    (run,) = runs_in(runs)
    found = load(run)
    assert found.job is not None
    assert tuple(found.job.command)[-7:-1] == SHOWN
    assert stat.S_IMODE((run / "job.json").stat().st_mode) == 0o600
    assert [record for record in found.records if isinstance(record.event, events.RankInterrupted)]
    for verb in ("report", "logs", "status", "trace"):
        told = subprocess.run(
            [sys.executable, "-m", "resilience.cli", verb, str(run)], capture_output=True, timeout=120, check=False
        )
        assert told.stdout, told.stderr
        assert not obeyed(told.stdout.decode() + told.stderr.decode())
    _holds_no_secret(run)


def _holds_no_secret(run: Path) -> None:
    for path in run.rglob("*"):
        if path.is_file() and "output" not in path.parts:
            assert SECRET.encode() not in path.read_bytes(), path
