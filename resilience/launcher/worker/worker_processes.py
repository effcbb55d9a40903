"""The workers of one cycle on this node: their processes, output and ends.

Holds a pidfd for each worker, so the agent wakes the moment one ends; exit statuses come from the process handlers of
torchelastic's context. Each end is reported once.

A worker in an uninterruptible wait of the kernel (a driver, a file server that does not answer) outlives SIGKILL. If a
killed worker makes no progress towards its end for KILL_LIMIT, the agent leaves it to the kernel and lists it in
`unkillable`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import NamedTuple

from torch.distributed.elastic.agent.server.api import Worker

from resilience.errors import LaunchError
from resilience.launcher.worker.notes import Note
from resilience.launcher.worker.workers import Workers
from resilience.launcher.worker.zygote import ForkedWorker
from resilience.system import processes
from resilience.system.channel import close_all
from resilience.system.processes import signal_name

LOOK = 0.1  # seconds between polls for an urgent stop
KILL_LIMIT = 10.0  # seconds without progress, as while a driver frees a device, after which a killed worker is given up
EXIT_LIMIT = 60.0  # seconds that a killed worker may take to end: freeing 1 TB takes 20


class EndedWorker(NamedTuple):
    """A worker that has ended. code: negative for a signal, as in subprocess."""

    local_rank: int
    rank: int
    pid: int
    code: int

    @property
    def how(self) -> str:
        """Return the ending in words."""
        return f"exit code {self.code}" if self.code >= 0 else signal_name(-self.code)


class ExitProgress:
    """Measures for how long killed processes have made no progress towards their end. A process that frees much memory
    or waits for a processor takes long, but it ends."""

    def __init__(
        self,
        sample: Callable[[int], Hashable | None] = processes.exit_sample,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """sample: see `processes.exit_sample`."""
        self._sample, self._clock = sample, clock
        self._last: dict[int, tuple[Hashable | None, float]] = {}  # last sample and since when, by pid

    def unkillable(self, pids: Iterable[int]) -> list[int]:
        """Sample these processes; return those that have made no progress for KILL_LIMIT."""
        now, unkillable = self._clock(), []
        for pid in pids:
            sample = self._sample(pid)
            last, since = self._last.get(pid, (None, now))
            if sample is None or sample != last:
                since = now
            self._last[pid] = sample, since
            if now - since >= KILL_LIMIT:
                unkillable.append(pid)
        return unkillable


def watched(context: Workers, workers: list[Worker]) -> RunningWorkers:
    """Return the started workers. Raises: LaunchError if they cannot be watched; they have been killed then."""
    try:
        return RunningWorkers(context, workers)
    except OSError as error:
        context.close(signal.SIGKILL, int(KILL_LIMIT))
        raise LaunchError(f"the workers cannot be watched, so they were killed: {error}") from error


class RunningWorkers:
    """One node's workers in one cycle."""

    def __init__(self, context: Workers, workers: list[Worker]) -> None:
        """Raises: OSError, if no descriptor is left."""
        self._context = context
        self._ranks = {worker.local_rank: worker.global_rank for worker in workers}
        self._pidfds: dict[int, int] = {}
        try:
            self._open_pidfds()
        except OSError:
            self._close_pidfds()
            raise
        self.living = set(self._ranks)
        self.unkillable: list[EndedWorker] = []  # recorded as ended by SIGKILL, but still there
        self.ended: list[EndedWorker] = []
        self._first_done_at: float | None = None  # when the first worker exited with 0

    def _open_pidfds(self) -> None:
        for local_rank, pid in self._context.pids().items():
            with contextlib.suppress(ProcessLookupError):  # ended already: `collect` finds out how
                self._pidfds[local_rank] = processes.open_pidfd(pid)

    def _close_pidfds(self) -> None:
        close_all(list(self._pidfds.values()))
        self._pidfds.clear()

    @property
    def descriptors(self) -> list[int]:
        """Return the descriptors that become readable when a worker ends."""
        return [fd for local_rank, fd in self._pidfds.items() if local_rank in self.living]

    def pids(self) -> list[int]:
        """Return the pids of the living workers."""
        return [self._context.subprocess_handlers[local_rank].proc.pid for local_rank in sorted(self.living)]

    def files(self, local_rank: int) -> tuple[str, str, str]:
        """Return the paths of a worker's stdout, stderr and error report; empty if there is none."""
        context = self._context
        return context.stdouts[local_rank], context.stderrs[local_rank], context.error_files[local_rank]

    def notes(self) -> list[tuple[int, Note]]:
        """Return the notes of forked workers since the last call, with their ranks."""
        processes = [
            (self._ranks[local_rank], handler.proc) for local_rank, handler in self._context.subprocess_handlers.items()
        ]
        readers = [(rank, process.notes) for rank, process in processes if isinstance(process, ForkedWorker)]
        return [(rank, note) for rank, reader in readers if reader is not None for note in reader.read()]

    def collect(self) -> list[EndedWorker]:
        """Return the workers that have ended since the last call."""
        ended = []
        for local_rank in sorted(self.living):
            process = self._context.subprocess_handlers[local_rank].proc
            code = process.poll()
            if code is not None:
                self.living.discard(local_rank)
                ended.append(EndedWorker(local_rank, self._ranks[local_rank], process.pid, code))
                if code == 0 and self._first_done_at is None:
                    self._first_done_at = time.monotonic()
        self.ended += ended
        return ended

    def refusal(self) -> LaunchError | None:
        """Return the error if the kernel refused to execute the program of a worker that has ended, else None."""
        return self._context.refusal()

    @property
    def apart(self) -> float:
        """Return the seconds since the first worker finished while others still run."""
        return time.monotonic() - self._first_done_at if self._first_done_at is not None and self.living else 0.0

    def give_up(self, pids: Collection[int]) -> list[EndedWorker]:
        """Stop waiting for living workers that survive SIGKILL; return them."""
        given_up = [
            EndedWorker(local_rank, self._ranks[local_rank], process.pid, -signal.SIGKILL)
            for local_rank in sorted(self.living)
            if (process := self._context.subprocess_handlers[local_rank].proc).pid in pids
        ]
        self.living -= {worker.local_rank for worker in given_up}
        self.unkillable += given_up
        return given_up

    @property
    def unshown(self) -> list[str]:
        """Return sentences on output of `--tee` that the terminal lacks, once the workers are stopped."""
        return self._context.unshown

    @property
    def ended_well(self) -> bool:
        """Return True if all workers have exited with status 0."""
        return not self.living and not self.unkillable and all(ended.code == 0 for ended in self.ended)

    def stop(self, number: int, limit: float, is_urgent: Callable[[], bool] = lambda: False) -> list[EndedWorker]:
        """End every living worker with this signal, and with SIGKILL after `limit` seconds or when it becomes urgent.
        Return those that have ended."""
        progress = ExitProgress()
        self.signal(number)
        self.signal(signal.SIGCONT)  # a stopped process would not act on the first signal
        ended = self._await_end(limit, is_urgent)
        if self.living:
            self.signal(signal.SIGKILL)
            ended += self._await_end(EXIT_LIMIT, lambda: len(progress.unkillable(self.pids())) == len(self.living))
            self.give_up(self.pids())
        self._close_pidfds()
        for worker in self.unkillable:  # torch before 2.13 waits for each of its processes without a limit
            self._context.subprocess_handlers.pop(worker.local_rank, None)
        self._context.close(signal.SIGKILL, 0)
        return ended

    def kill(self, pid: int) -> None:
        """Kill the process group of a living worker."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to the process group of every living worker."""
        for local_rank in self.living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._context.subprocess_handlers[local_rank].proc.pid, number)

    def _await_end(self, limit: float, is_urgent: Callable[[], bool] = lambda: False) -> list[EndedWorker]:
        deadline = time.monotonic() + limit
        ended = self.collect()
        while self.living and time.monotonic() < deadline and not is_urgent():
            poll = select.poll()
            for fd in self.descriptors:
                poll.register(fd, select.POLLIN)
            poll.poll(max(0.0, min(LOOK, deadline - time.monotonic())) * 1000)
            ended += self.collect()
        return ended
