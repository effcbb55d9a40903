"""The workers of one cycle on this node: their processes, output and ends.

Holds a pidfd for each, so that the agent wakes the moment one ends; exit statuses come from the process
handlers of torchelastic's context. A worker that ends is told once.

A worker in an uninterruptible wait of the kernel (a driver, a file server that does not answer) outlives SIGKILL.
Nobody waits for it longer than KILL_LIMIT: it is left to the kernel, and `stuck` has it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from torch.distributed.elastic.agent.server.api import Worker
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from resilience.launcher.zygote import Worker as Forked

LOOK = 0.1  # seconds between looks whether a person is in a hurry
KILL_LIMIT = 2.0  # seconds that a killed worker may take to be gone


class Ended(NamedTuple):
    """A worker that is gone. code: negative for a signal, as subprocess has it."""

    local_rank: int
    rank: int
    pid: int
    code: int

    @property
    def how(self) -> str:
        """In words."""
        return f"exit code {self.code}" if self.code >= 0 else signal_name(-self.code)


class Running:
    """One node's workers in one cycle."""

    def __init__(self, context: SubprocessContext, workers: list[Worker]) -> None:
        self._context = context
        self._ranks = {worker.local_rank: worker.global_rank for worker in workers}
        self._pidfds: dict[int, int] = {}
        for local_rank, pid in context.pids().items():
            with contextlib.suppress(ProcessLookupError):  # gone already: the next look tells how
                self._pidfds[local_rank] = os.pidfd_open(pid)
        self.living = set(self._ranks)
        self.stuck: list[Ended] = []  # as if SIGKILL had ended them, but they are still there
        self.ended: list[Ended] = []
        self._done_at: float | None = None  # when the first one ended well

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when a worker ends."""
        return [fd for local_rank, fd in self._pidfds.items() if local_rank in self.living]

    def pids(self) -> list[int]:
        """The pids of the living."""
        return [self._context.subprocess_handlers[local_rank].proc.pid for local_rank in sorted(self.living)]

    def files(self, local_rank: int) -> tuple[str, str, str]:
        """Where a worker's stdout, stderr and error report are; empty where nowhere."""
        context = self._context
        return context.stdouts[local_rank], context.stderrs[local_rank], context.error_files[local_rank]

    def notes(self) -> list[tuple[int, str]]:
        """Return what forked workers have noted since the last time, by rank."""
        processes = [(self._ranks[place], each.proc) for place, each in self._context.subprocess_handlers.items()]
        readers = [(rank, process.notes) for rank, process in processes if isinstance(process, Forked)]
        return [(rank, line) for rank, reader in readers if reader is not None for line in reader.read()]

    def collect(self) -> list[Ended]:
        """Return the workers that have ended since the last look."""
        new = []
        for local_rank in sorted(self.living):
            process = self._context.subprocess_handlers[local_rank].proc
            code = process.poll()
            if code is not None:
                self.living.discard(local_rank)
                new.append(Ended(local_rank, self._ranks[local_rank], process.pid, code))
                if code == 0 and self._done_at is None:
                    self._done_at = time.monotonic()
        self.ended += new
        return new

    @property
    def apart(self) -> float:
        """Seconds for which some workers have been through while others are not."""
        return time.monotonic() - self._done_at if self._done_at is not None and self.living else 0.0

    def give_up(self, pids: Collection[int]) -> list[Ended]:
        """Wait no more for living workers that SIGKILL does not end; answers them."""
        given_up = [
            Ended(local_rank, self._ranks[local_rank], process.pid, -signal.SIGKILL)
            for local_rank in sorted(self.living)
            if (process := self._context.subprocess_handlers[local_rank].proc).pid in pids
        ]
        self.living -= {each.local_rank for each in given_up}
        self.stuck += given_up
        return given_up

    @property
    def ended_well(self) -> bool:
        """Whether all workers have ended with exit status 0."""
        return not self.living and not self.stuck and all(ended.code == 0 for ended in self.ended)

    def stop(self, number: int, limit: float, is_urgent: Callable[[], bool] = lambda: False) -> list[Ended]:
        """End every worker that still lives: by this signal, and by SIGKILL after `limit` seconds or once it is urgent.
        Return those that have ended."""
        self.signal(number)
        self.signal(signal.SIGCONT)  # one that is stopped would not heed the other
        new = self._await_end(limit, is_urgent)
        if self.living:
            self.signal(signal.SIGKILL)
            new += self._await_end(KILL_LIMIT)
            self.give_up(self.pids())
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()
        self._context.close(signal.SIGKILL, 0)
        return new

    def signal(self, number: int) -> None:
        """Send a signal to every living worker and what it has started."""
        for local_rank in self.living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._context.subprocess_handlers[local_rank].proc.pid, number)

    def _await_end(self, limit: float, is_urgent: Callable[[], bool] = lambda: False) -> list[Ended]:
        deadline = time.monotonic() + limit
        new = self.collect()
        while self.living and time.monotonic() < deadline and not is_urgent():
            poll = select.poll()
            for fd in self.descriptors:
                poll.register(fd, select.POLLIN)
            poll.poll(max(0.0, min(LOOK, deadline - time.monotonic())) * 1000)
            new += self.collect()
        return new


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
