"""Which workers survive SIGKILL?  Workers in an uninterruptible wait of the kernel, for example for a failed driver.

A monitor kills a hung worker, and the agent waits for its end. If that end does not come, the agent checks after a
while which of the killed workers are still there. If the user sets torch's limit for such waits, the agent kills the
worker itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from resilience.facts.interruptions import Interruption, InterruptionRecord
from resilience.launcher.worker.worker_processes import KILL_LIMIT, EndedWorker, ExitProgress
from resilience.system import processes


class Uninterruptible:
    """Notices workers that stay in an uninterruptible wait (state D) for longer than the user allows. As in torch, a
    worker is in such a wait if each look finds its main thread in one."""

    def __init__(
        self,
        limit: float,
        state: Callable[[int], processes.ProcessState | None] = processes.state,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """limit: seconds; 0: none."""
        self.limit = limit
        self._state, self._clock = state, clock
        self._since: dict[int, float] = {}  # by pid

    def exceeded(self, pids: Sequence[int]) -> list[int]:
        """Look at these workers. Return those that have been in such a wait for the limit."""
        if not self.limit:
            return []
        now = self._clock()
        states = {pid: self._state(pid) for pid in pids}
        waiting = [pid for pid, state in states.items() if state is not None and state.state == "D"]
        self._since = {pid: self._since.get(pid, now) for pid in waiting}
        return [pid for pid, since in self._since.items() if now - since >= self.limit]


class Killed:
    """Workers of a cycle that their monitors, or the agent, kill for a hang."""

    def __init__(self, grace: float) -> None:
        """grace: seconds between the first signal and SIGKILL."""
        self._limit = grace + KILL_LIMIT
        self._progress = ExitProgress()
        self._since: dict[int, float] = {}  # by pid

    def note(self, record: InterruptionRecord) -> None:
        """Note the worker if a monitor kills it for a hang."""
        if record.interruption is Interruption.HARD_TIMEOUT and record.pid is not None:
            self.add(record.pid)

    def add(self, pid: int) -> None:
        """Note that this worker is being killed."""
        self._since.setdefault(pid, time.monotonic())

    def __contains__(self, pid: int) -> bool:
        return pid in self._since

    def survivors(self, pids: Sequence[int]) -> list[int]:
        """Return the workers among these living ones that do not end."""
        unkillable = self._progress.unkillable(pid for pid in pids if pid in self)
        return [pid for pid in unkillable if time.monotonic() - self._since[pid] > self._limit]


def in_words(workers: Sequence[EndedWorker]) -> str:
    """Describe the workers that cannot be killed, and where in the kernel they wait."""
    sentences = []
    for worker in workers:
        process, wait_function = processes.state(worker.pid), processes.waits_in(worker.pid)
        sentences.append(
            f"rank {worker.rank} (pid {worker.pid}) cannot be killed, not even by SIGKILL: "
            f"state {'gone' if process is None else process.state}"
            + (f", in the kernel's {wait_function}" if wait_function else "")
        )
    return "; ".join(sentences)
