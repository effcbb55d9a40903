"""`resilience demo`: lose ranks in three ways, go on each time, and prove that nothing was lost.

Trains the same model twice: once with spares, planned faults and the wrapper, once undisturbed and
without it. In between it shows the account that the first run left behind. The exit status is 0 only
if every fault struck and was recovered from, the account names each of them, the parameters are equal
bit for bit, and no process is left. Here are the options and the exit status; `demo_runs` runs
it, `demo_train` is what is trained, `demo_ranks` the processes, `demo_screen` the looks."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from resilience.adapters.environment import Settings
from resilience.cli.demo_faults import HANG_LIMIT, checked, schedule, span
from resilience.cli.demo_screen import Screen
from resilience.cli.ending import ended_by_signals

INTERRUPTED = 128 + signal.SIGINT  # exit status
RANKS, STEPS = range(2, 17), range(20, 100_001)  # what is allowed
DESCRIPTION = """\
Train a small character transformer on several ranks, lose some of them on the way, and end with
exactly the parameters of an undisturbed run. Takes about half a minute on two cores."""
FAULT_HELP = f"""\
a planned fault, repeatable: KIND, KIND@STEP or KIND@STEP:RANK. KIND is `exception` (raised while
loading data), `kill` (SIGKILL) or `hang` (noticed after {HANG_LIMIT:g} s of silence); STEP is the step that is
about to begin, RANK whoever holds that rank then. What is left out is drawn from --seed. `none`: no
faults. Default: exception, kill, hang"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "--ranks", type=int, default=4, metavar="N", help=f"active ranks, {span(RANKS)}; default %(default)s"
    )
    parser.add_argument(
        "--steps", type=int, default=200, metavar="N", help=f"training steps, {span(STEPS)}; default %(default)s"
    )
    parser.add_argument("--fault", action="append", default=[], metavar="FAULT", help=FAULT_HELP)
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of model, data and faults; default %(default)s"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the run's folder under RESILIENCE_RUN_DIR (default ./resilience-runs), for `resilience report`",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the demonstration; return the exit status: 0, 1 if something did not hold, 130 after Ctrl-C.

    Raises: ConfigurationError for an argument that is not allowed."""
    ranks = checked("--ranks", arguments.ranks, RANKS)
    steps = checked("--steps", arguments.steps, STEPS)
    faults = schedule(arguments.fault, ranks, steps, arguments.seed)
    # One thread each: sums in one order, and a process that can fork.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    began = time.monotonic()
    screen = Screen(sys.stdout)
    run_dir = Path(Settings.from_environment().run_dir if arguments.keep else tempfile.mkdtemp(prefix="resilience-"))
    job_id = f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    status = INTERRUPTED
    try:
        with ended_by_signals():
            screen.say(("loading torch …", "dim"))
            from resilience.cli.demo_runs import Demonstration

            demonstration = Demonstration(screen, ranks, steps, faults, arguments.seed, run_dir.absolute(), job_id)
            status = 0 if demonstration.run() else 1
            screen.say()
            screen.say((f"{time.monotonic() - began:.0f} s in all", "dim"))
    except KeyboardInterrupt:
        screen.say()
        screen.say(("interrupted; every process was ended", "yellow"))
    finally:
        if arguments.keep or status == 1:
            screen.say(f"The run is kept: resilience report {_shown(run_dir / job_id)}")
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
    return status


def _shown(path: Path) -> str:
    """A path as short as it can be written from here."""
    relative = os.path.relpath(path)
    return min(relative, str(path), key=len)
