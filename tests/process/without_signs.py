"""A job whose function shows no progress that anybody can see: no step, ping, heartbeat or section."""

from __future__ import annotations

import os
import time
from pathlib import Path

from resilience.inprocess import CallWrapper, Wrapper


def restart_once(go: str) -> int:
    """Rank 1 fails once; then all wait for the file `go`. Return the iteration."""

    @Wrapper()
    def work(call: CallWrapper) -> int:
        if call.iteration == 0 and os.environ["RANK"] == "1":
            raise RuntimeError("broken, by schedule")
        while call.iteration == 0 or not Path(go).exists():
            time.sleep(0.01)
        return call.iteration

    return work()  # type: ignore[call-arg,no-any-return]
