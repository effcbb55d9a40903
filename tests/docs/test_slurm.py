"""The job script for Slurm draws the right conclusion from its tasks, with stand-ins for Slurm and for the launcher."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.server import ROOT

SCRIPT = ROOT / "examples" / "slurm" / "job.sbatch"
STAND_INS = {
    "scontrol": """case $1 in
show) echo "NodeAddr=10.0.0.1" ;;
update) echo "$@" >>"$RESILIENCE_RUN_DIR/updates" ;;
esac""",
    # Runs one task for each status; its own status is the highest one, as with Slurm.
    "srun": """highest=0 place=0
while [ "${1#--}" != "$1" ]; do echo "$1" >>"$RESILIENCE_RUN_DIR/srun"; shift; done
for status in $STATUSES; do
    if [ $status = lost ]; then code=137; else SLURM_PROCID=$place STATUS=$status "$@"; code=$?; fi
    [ $code -gt $highest ] && highest=$code
    place=$((place + 1))
done
exit $highest""",
    "resilience": """echo "$@" >>"$RESILIENCE_RUN_DIR/arguments"
[ "$STATUS" = 143 ] && kill -TERM $PPID
exit $STATUS""",
}


@pytest.mark.parametrize(
    ("statuses", "expected", "is_requeued"),
    [
        ("0 0", 0, True),
        ("0 lost", 0, True),
        ("0 137", 0, True),  # the agent was killed, and its task's shell lives on
        ("95 0", 0, True),
        ("93 93", 93, False),
        ("93 lost", 93, False),
        ("93 143", 93, False),
        ("1 lost", 137, True),
        ("143 143", 143, True),
    ],
)
def test_status_of_the_job_is_that_of_its_nodes_and_not_of_one_that_was_lost(
    tmp_path: Path, statuses: str, expected: int, is_requeued: bool
) -> None:
    runs = tmp_path / "runs"
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    env = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "RESILIENCE_RUN_DIR": str(runs),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "STATUSES": statuses,
    }
    ended = subprocess.run(["bash", SCRIPT, "train.py", "--text=a b"], env=env, cwd=tmp_path, check=False, timeout=60)
    assert ended.returncode == expected
    assert (runs / "updates").exists() is not is_requeued
    first = (runs / "arguments").read_text().splitlines()[0]
    assert "--rdzv-endpoint 10.0.0.1:29517 --rdzv-conf is_host=1,last_call_timeout=5" in first
    assert first.endswith("--on-sigterm stop train.py --text=a b")
    # The first task that ends must not end the others: for the loss of a node, a failure, or the site's WaitTime.
    assert (runs / "srun").read_text().split() == ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
    assert sorted(path.name for path in runs.iterdir()) == ["arguments", "srun"] + ["updates"] * (not is_requeued)
