"""Which workers does SIGKILL not end?  Those in an uninterruptible wait of the kernel, as for a driver that failed.

A monitor kills a worker that hangs, and the agent waits for its end, which does not come. So what was found to hang
is looked at again after a while."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from resilience.adapters import processes
from resilience.core.attribution import Interruption, InterruptionRecord
from resilience.launcher.running import KILL_LIMIT, Ended

UNINTERRUPTIBLE = "DZ"  # states of a main thread: in the kernel, or gone while another thread is there


class Killed:
    """Workers of a cycle that their monitors kill for a hang."""

    def __init__(self, grace: float) -> None:
        """grace: seconds between the first signal and SIGKILL."""
        self._limit = grace + KILL_LIMIT
        self._since: dict[int, float] = {}  # by pid

    def note(self, record: InterruptionRecord) -> None:
        """Take into account what a monitor has found."""
        if record.interruption is Interruption.HARD_TIMEOUT and record.pid is not None:
            self._since.setdefault(record.pid, time.monotonic())

    def __contains__(self, pid: int) -> bool:
        return pid in self._since

    def survivors(self, pids: Sequence[int]) -> list[int]:
        """Return which of these living workers will not end."""
        late = [pid for pid in pids if time.monotonic() - self._since.get(pid, math.inf) > self._limit]
        return [pid for pid in late if (seen := processes.state(pid)) is not None and seen.state in UNINTERRUPTIBLE]


def in_words(stuck: Sequence[Ended]) -> str:
    """Say who cannot be ended, and where in the kernel he is."""
    told = []
    for each in stuck:
        seen, place = processes.state(each.pid), processes.waits_in(each.pid)
        told.append(
            f"rank {each.rank} (pid {each.pid}) cannot be ended, not by SIGKILL either: "
            f"state {'gone' if seen is None else seen.state}" + (f", in the kernel's {place}" if place else "")
        )
    return "; ".join(told)
