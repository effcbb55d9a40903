"""`resilience demo`: train, recover from three injected faults, and prove that nothing was lost.

Trains the same model twice: once with spares, planned faults and the wrapper, once undisturbed and without the
wrapper. In between it shows the report of the first run. The exit status is 0 only if the run recovered from every
fault, the report identifies each of them, the parameters are equal bit for bit, and no process is left. This module
has the options and the exit status; the training and its screens are in `demo/`."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from resilience.demo.faults import HANG_LIMIT, checked, schedule, span
from resilience.demo.screen import DemoScreen
from resilience.system.environment import Settings
from resilience.system.exit_signals import ended_by_signals

INTERRUPTED = 128 + signal.SIGINT  # exit status
RANKS, STEPS = range(2, 17), range(20, 100_001)  # allowed values
DESCRIPTION = """\
Train a small character transformer on several ranks, lose some of them during training, and end with exactly
the parameters of an undisturbed run. Takes about half a minute on two cores."""
FAULT_HELP = f"""\
a fault to inject, repeatable: KIND, KIND@STEP or KIND@STEP:RANK. KIND is `exception` (raised while loading
data), `kill` (SIGKILL) or `hang` (detected after {HANG_LIMIT:g} s of silence). The fault occurs before STEP on the
process that is RANK then. Omitted parts are drawn at random from --seed. `none`: no faults. Default: one each
of exception, kill and hang"""


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
        "--seed", type=int, default=0, metavar="N", help="random seed of model, data and faults; default %(default)s"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the run folder in RESILIENCE_RUN_DIR (default ./resilience-runs), for `resilience report`",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the demonstration; return the exit status: 0, 1 if a check failed, 130 after Ctrl-C.

    Raises: ConfigurationError for an argument that is not allowed."""
    ranks = checked("--ranks", arguments.ranks, RANKS)
    steps = checked("--steps", arguments.steps, STEPS)
    faults = schedule(arguments.fault, ranks, steps, arguments.seed)
    # One thread per process: sums have a fixed order, and the process can fork.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    began = time.monotonic()
    screen = DemoScreen(sys.stdout)
    run_dir = Path(Settings.from_environment().run_dir if arguments.keep else tempfile.mkdtemp(prefix="resilience-"))
    job_id = f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    status = INTERRUPTED
    try:
        with ended_by_signals():
            screen.say(("loading torch …", "dim"))
            from resilience.demo.runs import Demonstration

            demonstration = Demonstration(screen, ranks, steps, faults, arguments.seed, run_dir.absolute(), job_id)
            status = 0 if demonstration.run() else 1
            screen.say()
            screen.say((f"{time.monotonic() - began:.0f} s in total", "dim"))
    except KeyboardInterrupt:
        screen.say()
        screen.say(("interrupted; all processes were stopped", "yellow"))
    finally:
        if arguments.keep or status == 1:
            screen.say(f"To see the report again: resilience report {_shortest(run_dir / job_id)}")
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
    return status


def _shortest(path: Path) -> str:
    """Return the shorter of the absolute path and the path relative to the working directory."""
    relative = os.path.relpath(path)
    return min(relative, str(path), key=len)
