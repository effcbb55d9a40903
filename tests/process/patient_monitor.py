"""The launcher's monitor of a rank, which waits for a stack as long as a busy machine needs for it."""

from __future__ import annotations

import sys

from resilience.monitor.program import main
from resilience.system import stacks

if __name__ == "__main__":
    stacks.ASK_LIMIT = 30.0
    main(sys.argv[1:])
