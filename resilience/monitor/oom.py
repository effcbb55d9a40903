"""Was the rank killed for memory?  Compares the cgroup's count of such kills before and after its end.

The count is that of the whole cgroup, which other processes share. So only kills shortly before the end of the rank
count."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from resilience.system import processes

LOOKS = 10  # one in about a second; a process with much memory takes seconds to end after the kernel has killed it


class OomKills:
    """The last counts of processes that were killed for memory. count: returns the present one, None if unknown."""

    def __init__(self, count: Callable[[], int | None] = processes.oom_kills) -> None:
        self._count = count
        self._counts = deque([count()], LOOKS)

    def look(self) -> None:
        """Store the present count. Called now and then while the rank lives."""
        self._counts.append(self._count())

    def have_risen(self) -> bool | None:
        """Return True if a process was killed for memory since the oldest stored count, None if unknown."""
        before, now = self._counts[0], self._count()
        return None if before is None or now is None else now > before
