"""Start ranks, wait for them, read their account.

A job is what a test holds: real processes forked from the fork server, each in its own process group, ended
by pid when the test is over. Expectations are on records, which `await_record` waits for. What a job that
ran to its end leaves running fails the test."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from resilience.facts import events
from resilience.facts.interruptions import Interruption, InterruptionRecord
from resilience.facts.records import Record
from tests.support import signs, stops
from tests.support.account import Account
from tests.support.server import ForkServer

_FIRST_PORT, _PORTS = 7000, 500  # for each process of a test run; a browser refuses some lower ports
LOOK_EVERY = 0.01  # seconds between looks at a run folder; with `signs`, the only place in the tests that polls


@dataclass
class Finished:
    """How a rank ended. value: what its function returned; error, type: what it raised."""

    status: int
    value: Any = None
    error: str = ""
    type: str = ""

    @property
    def code(self) -> int | None:
        return os.waitstatus_to_exitcode(self.status) if os.WIFEXITED(self.status) else None

    @property
    def signal(self) -> int | None:
        return os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else None


@dataclass
class Job:
    """Ranks that were started together."""

    server: ForkServer
    folder: Path
    key: str
    pids: list[int] = field(default_factory=list)  # by initial rank
    finished: dict[int, Finished] = field(default_factory=dict)
    ran_to_its_end: bool = False
    leave_limit: float = 120.0  # seconds for a finished job's last processes to be gone

    @cached_property
    def account(self) -> Account:
        """The account in the run folder, once there is one."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            found = sorted((self.folder / "runs").glob("[!.]*"))  # .targets is for scrapers
            if found:
                return Account(found[0])
            time.sleep(LOOK_EVERY)
        raise AssertionError("no run folder appeared within 120 s" + self.output())

    @property
    def run(self) -> Path:
        """The run folder, once there is one."""
        return self.account.folder

    # -- the processes --------------------------------------------------------------------------

    def wait(self, limit: float = 120.0) -> list[Finished]:
        """Wait until all ranks and their monitors have ended; answers how, by initial rank."""
        self.wait_ranks(limit)
        for rank in range(len(self.pids)):
            self.await_record(events.MonitorEnded, rank=rank, role="monitor")
        self._await_monitors()
        self.ran_to_its_end = True
        return [self.finished[rank] for rank in range(len(self.pids))]

    def _await_monitors(self, limit: float = 120.0) -> None:
        """Wait until each monitor that ranks left behind has told its end or is gone. One is for one call only: that of
        the last call may be late to tell anything."""
        deadline = time.monotonic() + limit
        for monitor in self.left_behind():
            while "res-monitor" in (told := in_words(monitor)) and monitor.pid not in {
                record.origin.pid for record in self.of(events.MonitorEnded)
            }:
                assert time.monotonic() < deadline, f"{told} has not told its end after {limit} s{self.output()}"
                time.sleep(LOOK_EVERY)

    def wait_ranks(self, limit: float = 120.0) -> list[Finished]:
        """Wait until all ranks have ended, whatever their functions were; answers how, by initial rank."""
        deadline = time.monotonic() + limit
        for rank in range(len(self.pids)):
            if self.wait_rank(rank, deadline - time.monotonic()) is None:
                late = [other for other in range(rank, len(self.pids)) if self.wait_rank(other, 0.0) is None]
                stacks = "".join(self.stacks(other) for other in late)
                raise AssertionError(f"ranks {late} have not ended after {limit} s{stacks}{self.output()}")
        return [self.finished[rank] for rank in range(len(self.pids))]

    def wait_rank(self, rank: int, limit: float = 120.0) -> Finished | None:
        status = self.server.wait(self.pids[rank], limit)
        if status is None:
            return None
        result = self.folder / f"{self.key}-{rank}.result"
        outcome = pickle.loads(result.read_bytes()) if result.exists() else {}
        self.finished[rank] = Finished(status, **outcome)
        return self.finished[rank]

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank, which must still be there."""
        assert self.server.wait(self.pids[rank], 0.0) is None, f"rank {rank} has ended already"
        os.kill(self.pids[rank], number)
        if number == signal.SIGSTOP:
            stops.await_stops([self.pids[rank]])

    def monitor_pid(self, rank: int) -> int:
        return self.await_record(events.MonitorStarted, rank=rank).origin.pid

    def await_sign(self, name: str, rank: int, limit: float = 120.0) -> None:
        """Wait until a rank has come to a point (tests.support.signs)."""
        signs.await_sign(self.folder, name, rank, limit)

    def await_sign_file(self, path: Path, limit: float = 120.0) -> None:
        """Wait until a file is there."""
        deadline = time.monotonic() + limit
        while not path.exists():
            assert time.monotonic() < deadline, f"no {path.name} within {limit} s{self.output()}"
            time.sleep(LOOK_EVERY)

    def let_on(self, name: str) -> None:
        """Let go all ranks that hold at a point (tests.support.signs)."""
        signs.let_on(self.folder, name)

    # -- the account ----------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """All records so far, in the order of this host's monotonic clock."""
        return self.account.records()

    def of(self, kind: type[events.Event], rank: int | None = None, role: str | None = None) -> list[Record]:
        """Records of one kind of event."""
        return [
            record
            for record in self.records()
            if isinstance(record.event, kind)
            and (rank is None or record.origin.initial_rank == rank)
            and (role is None or record.origin.role == role)
        ]

    def await_record(
        self,
        kind: type[events.Event],
        rank: int | None = None,
        role: str | None = None,
        where: Callable[[Any], bool] = lambda event: True,
        limit: float = 120.0,
    ) -> Record:
        """Wait until a record is there and return it."""
        deadline = time.monotonic() + limit
        while True:
            for record in self.of(kind, rank, role):
                if where(record.event):
                    return record
            if time.monotonic() > deadline:
                told = "\n".join(f"{r.origin.initial_rank} {r.origin.role} {r.event}"[:300] for r in self.records())
                raise AssertionError(
                    f"no {kind.__name__} of rank {rank} within {limit} s; there are:\n{told}{self.output()}"
                )
            time.sleep(LOOK_EVERY)

    def interruptions(self, iteration: int | None = None) -> list[InterruptionRecord]:
        """The interruption records, in the order in which they were made."""
        found = [record.event.record for record in self.records() if isinstance(record.event, events.RankInterrupted)]
        return [told for told in found if iteration is None or told.iteration == iteration]

    def kinds(self, iteration: int) -> dict[int, set[Interruption]]:
        """Which interruptions each rank has on record in an iteration."""
        kinds: dict[int, set[Interruption]] = {}
        for told in self.interruptions(iteration):
            kinds.setdefault(told.rank, set()).add(told.interruption)
        return kinds

    # -- for messages ---------------------------------------------------------------------------

    def written(self) -> str:
        """All that the ranks have written. A warning of torch with its stack may have followed what is looked for."""
        return self.output(most=sys.maxsize)

    def output(self, most: int = 2000) -> str:
        """The last characters that each rank has written to each stream, for a message."""
        texts = [
            f"\n--- {path.name}\n{path.read_text(errors='replace')[-most:]}"
            for path in sorted(self.folder.glob(f"{self.key}-*.[12]"))
            if path.stat().st_size
        ]
        return "".join(texts)

    def told(self, most: int = 120, width: int = 400) -> str:
        """The last records, a line each with its time since the first one, and the output; waits for nothing."""
        lines = [f"{self.key}: {', '.join(f'{rank} {end}' for rank, end in sorted(self.finished.items()))}"]
        for run in sorted((self.folder / "runs").glob("[!.]*")):
            records = Account(run).records()
            lines += [f"--- {run.name}: the last {min(most, len(records))} of {len(records)} records"]
            lines += [
                f"{(record.mono_ns - records[0].mono_ns) / 1e9:9.3f} {record.origin.initial_rank} {record.origin.role} "
                f"{record.event}"[:width]
                for record in records[-most:]
            ]
        return "\n".join(lines) + self.output()

    def stacks(self, rank: int) -> str:
        return f"\n--- stacks of rank {rank}\n{stacks_of(self.pids[rank])}"

    # -- the end --------------------------------------------------------------------------------

    def end(self) -> None:
        """End what still runs. Raises: AssertionError if a job that ran to its end left something behind."""
        for pid in self.pids:
            if self.server.wait(pid, 0.0) is None:
                self.ran_to_its_end = False
                with suppress(ProcessLookupError):  # it has just ended, and what the server tells of it is not read yet
                    os.kill(pid, 9)
                self.server.wait(pid, 10.0)
        left = self.left_behind()
        _, alive = psutil.wait_procs(left, self.leave_limit if self.ran_to_its_end else 0.0)
        told = [text for process in alive if self.ran_to_its_end and (text := in_words(process))]
        stacks = "".join(f"\n--- stacks of {process.pid}\n{stacks_of(process.pid)}" for process in alive if told)
        for process in alive:
            with suppress(psutil.NoSuchProcess):  # it has just ended by itself
                process.kill()
        psutil.wait_procs(alive, 10.0)
        assert not told, f"left running by a finished job: {', '.join(told)}{stacks}{self.output()}"

    def left_behind(self) -> list[psutil.Process]:
        """Processes that ranks of this job left to the fork server, which adopts them."""
        left = []
        for process in psutil.Process(self.server.pid).children(recursive=True):
            try:
                if Path(process.cwd()) == self.folder and process.pid not in self.pids:
                    left.append(process)
            except psutil.Error:
                continue  # gone meanwhile
        return left


def in_words(process: psutil.Process) -> str:
    """Return which process it is; empty if it has ended, which it may do at any moment."""
    with suppress(psutil.Error):
        if process.is_running():
            return f"{process.pid} {process.name()} {process.status()}"
    return ""


def stacks_of(pid: int) -> str:
    """Return the Python stacks of all threads of a process, as py-spy shows them."""
    py_spy = Path(sys.executable).with_name("py-spy")
    command = [str(py_spy), "dump", "--nonblocking", "--pid", str(pid)]
    dump = subprocess.run(command, capture_output=True, text=True, check=False)
    return (dump.stdout or dump.stderr)[-3000:]


_ports = itertools.count(random.SystemRandom().randrange(_PORTS))


def free_port() -> int:
    """Return a TCP port of the loopback address that nobody uses now.

    The package's own stores take ports from 10,000 on, and the kernel gives clients higher ones: what is returned lies
    below. Each process of a test run has its own ports and returns the same one as late as possible."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = _FIRST_PORT + process * _PORTS % (10_000 - _FIRST_PORT)
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", first + next(_ports) % _PORTS))
            return int(probe.getsockname()[1])


_numbers = itertools.count()
of_this_test: list[Job] = []  # that are not ended yet


@contextmanager
def started(
    server: ForkServer,
    folder: Path,
    world_size: int,
    target: str,
    kwargs: dict[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    env_of: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> Iterator[Job]:
    """Start `world_size` ranks of `target` ("module:function", called with kwargs).

    env: what all ranks get beside torchrun's variables; env_of: what the rank of that number gets."""
    job = Job(server, folder, f"job{next(_numbers)}")
    port = str(free_port())
    of_this_test.append(job)
    try:
        for rank in range(world_size):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "RESILIENCE_RUN_DIR": str(folder / "runs"),
                "RES_OPTIONS": "timeout:1 attempts:1",  # a lost lookup is shorter than the shortest limit
                **(env or {}),
                **env_of(rank),
            }
            job.pids.append(server.start(f"{job.key}-{rank}", folder, target, dict(kwargs or {}), variables))
        yield job
    except BaseException:
        job.ran_to_its_end = False  # the test has failed already; just end what is left
        raise
    finally:
        of_this_test.remove(job)
        job.end()
