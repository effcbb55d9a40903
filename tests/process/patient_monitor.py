"""The program of a rank monitor that waits for what a busy machine is slow to give: stacks and last lines, and with
SLOW_ANSWERS=evidence in its environment the positions of the other ranks."""

from __future__ import annotations

import os
import sys

from resilience.core import watch
from resilience.monitor import evidence, program
from resilience.system import background, stacks

PATIENCE = 60.0  # seconds

if __name__ == "__main__":
    stacks.ASK_LIMIT = stacks.DUMP_LIMIT = evidence.READ_LIMIT = background.STALL = PATIENCE
    if os.environ.get("SLOW_ANSWERS") == "evidence":
        watch.EVIDENCE = PATIENCE
    program.main(sys.argv[1:])
