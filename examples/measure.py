"""Measures what each step of the ramp saves: time from a fault to the first repeated step.

    python examples/measure.py --ranks 4 --repeats 5

Runs the example scripts in turn, one fault in each run, and prints a table of medians. A job that the fault ends
is started again at once, as by a scheduler without a queue. Times are taken when the lines of the scripts arrive:
from "fault: …", written just before the fault, to the first step after the checkpoint."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
STEPS, FAULT_STEP, RESUMED_STEP = 30, 25, 20  # the scripts write a checkpoint every 10 steps


class Case(NamedTuple):
    script: str
    fault: str
    spares: int
    what: str


CASES = (
    Case("00_plain.py", "exception", 0, "job starts anew"),
    Case("01_wrap_main.py", "exception", 0, "`main` starts anew in the same processes"),
    Case("02_build_outside.py", "exception", 0, "… and finds data, model and optimiser built"),
    Case("00_plain.py", "kill", 0, "job starts anew"),
    Case("02_build_outside.py", "kill", 0, "goes on with one rank less"),
    Case("03_reserve_ranks.py", "kill", 1, "goes on at full size: the spare steps in"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what each step of the ramp saves per restart.")
    parser.add_argument("--ranks", type=int, default=4, help="active ranks")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    samples: dict[Case, list[float]] = {case: [] for case in CASES}
    for _ in range(options.repeats):
        for case in CASES:  # interleaved, so that other work on the machine affects all cases alike
            samples[case].append(_measure(case, options.ranks))
            print(f"{case.script} {case.fault}: {samples[case][-1]:.2f} s", file=sys.stderr)
    print("| script | fault | what happens | median s | min - max s |")
    print("|---|---|---|---|---|")
    for case, times in samples.items():
        median, span = statistics.median(times), f"{min(times):.2f} - {max(times):.2f}"
        print(f"| `{case.script}` | {case.fault} | {case.what} | {median:.2f} | {span} |")


def _measure(case: Case, ranks: int) -> float:
    """Return the seconds from the fault to the first step after it."""
    with tempfile.TemporaryDirectory() as folder:
        fault_at = None
        for _ in range(2):  # a second time if the fault ends the job
            for at, line in _lines(case, ranks, Path(folder)):
                if line.startswith("fault:"):
                    fault_at = at
                elif line.startswith(f"step {RESUMED_STEP} ") and fault_at is not None:
                    return at - fault_at
    raise RuntimeError(f"{case.script} did not come back after {case.fault}; run it by hand to see why")


def _lines(case: Case, ranks: int, folder: Path):
    """Start the job; yield each line with the time of its arrival until the job ends or the caller stops reading."""
    command = [
        *(sys.executable, str(HERE / "launch.py"), "--nproc", str(ranks + case.spares), str(HERE / case.script)),
        *("--steps", str(STEPS), "--checkpoints", str(folder), "--fault", f"{case.fault}@{FAULT_STEP}:1"),
    ]
    environment = dict(os.environ, RESILIENCE_RUN_DIR=str(folder / "runs"))
    job = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder
    )
    assert job.stdout is not None
    try:
        for line in job.stdout:
            yield time.monotonic(), line
    finally:
        for _ in job.stdout:  # to its end, so that no other run shares the machine with the next one
            pass
        job.wait()


if __name__ == "__main__":
    main()
