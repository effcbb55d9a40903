"""Start ranks, wait for them, read their account.

A job is what a test holds: real processes forked from the fork server, each in its own process group, ended
by pid when the test is over. Expectations are on records, which `await_record` waits for."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from resilience.core import events
from resilience.core.attribution import Interruption, InterruptionRecord
from resilience.core.records import Record, from_line

ROOT = Path(__file__).resolve().parents[2]
LOOK_EVERY = 0.01  # seconds between looks at a run folder; the only place in the tests that polls


class ForkServer:
    """The preloaded process, one a test session."""

    def __init__(self) -> None:
        env = dict(os.environ, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
        # gloo looks the host's own name up, which takes 5 s now and then where reverse DNS does not answer.
        env["GLOO_SOCKET_IFNAME"] = "lo"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forkserver"],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._buffer = b""
        self.ended: dict[int, int] = {}  # pid -> wait status
        self._started: dict[str, int] = {}
        self._read_until(lambda message: "ready" in message, 120.0)

    def start(self, key: str, folder: Path, target: str, kwargs: dict[str, Any], env: dict[str, str]) -> int:
        """Fork a rank; answers its pid."""
        request = {"key": key, "folder": str(folder), "target": target, "kwargs": kwargs, "env": env}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        self._read_until(lambda _: key in self._started, 60.0)
        return self._started.pop(key)

    def wait(self, pid: int, limit: float) -> int | None:
        """Wait until a rank has ended; answers its wait status, None if it runs on."""
        self._read_until(lambda _: pid in self.ended, limit, must=False)
        return self.ended.get(pid)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read_until(self, done: Callable[[dict[str, Any]], bool], limit: float, must: bool = True) -> None:
        deadline = time.monotonic() + limit
        message: dict[str, Any] = {}
        while not done(message):
            message = self._next(deadline - time.monotonic())
            if not message and time.monotonic() >= deadline:
                assert not must, f"the fork server did not answer within {limit} s"
                return
            if "ended" in message:
                self.ended[message["ended"]] = message["status"]
            if "started" in message:
                self._started[message["key"]] = message["started"]

    def _next(self, limit: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([fd], [], [], max(0.0, limit))[0]:
                return {}
            data = os.read(fd, 65536)
            assert data, "the fork server has ended"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return dict(json.loads(line))


@dataclass
class Finished:
    """How a rank ended."""

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
    pids: list[int]
    key: str
    finished: dict[int, Finished] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        """The run folder, once there is one."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = sorted((self.folder / "runs").glob("*"))
            if found:
                return found[0]
            time.sleep(LOOK_EVERY)
        raise AssertionError("no run folder appeared within 60 s" + self.output())

    def wait(self, limit: float = 60.0) -> list[Finished]:
        """Wait until all ranks and their monitors have ended; answers how, by initial rank."""
        deadline = time.monotonic() + limit
        for rank in range(len(self.pids)):
            if self.wait_rank(rank, deadline - time.monotonic()) is None:
                raise AssertionError(f"rank {rank} has not ended after {limit} s{self.stacks(rank)}{self.output()}")
        for rank in range(len(self.pids)):
            self.await_record(events.MonitorEnded, rank=rank, role="monitor")
        return [self.finished[rank] for rank in range(len(self.pids))]

    def wait_rank(self, rank: int, limit: float = 60.0) -> Finished | None:
        status = self.server.wait(self.pids[rank], limit)
        if status is None:
            return None
        result = self.folder / f"{self.key}-{rank}.result"
        outcome = pickle.loads(result.read_bytes()) if result.exists() else {}
        self.finished[rank] = Finished(status, **outcome)
        return self.finished[rank]

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank, which must be one of this job's and still be there."""
        assert self.pids[rank] not in self.server.ended
        os.kill(self.pids[rank], number)

    def monitor_pid(self, rank: int) -> int:
        return self.await_record(events.MonitorStarted, rank=rank).origin.pid

    # -- the account ----------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """All records so far, in the order of this host's monotonic clock; a torn last line is left out."""
        found: list[Record] = []
        for path in sorted(self.run.glob("records/*.jsonl")):
            for line in path.read_bytes().splitlines():
                try:
                    found.append(from_line(line))
                except msgspec.DecodeError:
                    continue
        return sorted(found, key=lambda record: record.mono_ns)

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
        limit: float = 30.0,
    ) -> Record:
        """Wait until a record is there and return it."""
        deadline = time.monotonic() + limit
        while True:
            for record in self.of(kind, rank, role):
                if where(record.event):
                    return record
            if time.monotonic() > deadline:
                told = [f"{r.origin.initial_rank} {r.origin.role} {r.event}"[:300] for r in self.records()]
                raise AssertionError(
                    f"no {kind.__name__} of rank {rank} within {limit} s; there are:\n" + "\n".join(told) + self.output()
                )
            time.sleep(LOOK_EVERY)

    def interruptions(self, iteration: int | None = None) -> list[InterruptionRecord]:
        """The interruption records, in the order in which they were made."""
        found = [record.event.record for record in self.of(events.Interrupted)]
        return [record for record in found if iteration is None or record.iteration == iteration]

    def kinds(self, iteration: int) -> dict[int, set[Interruption]]:
        """Which interruptions each rank has on record in an iteration."""
        kinds: dict[int, set[Interruption]] = {}
        for record in self.interruptions(iteration):
            kinds.setdefault(record.rank, set()).add(record.interruption)
        return kinds

    # -- for messages ---------------------------------------------------------------------------

    def output(self) -> str:
        texts = [
            f"\n--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.folder.glob(f"{self.key}-*.[12]"))
            if path.stat().st_size
        ]
        return "".join(texts)

    def stacks(self, rank: int) -> str:
        dump = subprocess.run(
            ["py-spy", "dump", "--nonblocking", "--pid", str(self.pids[rank])], capture_output=True, text=True, check=False
        )
        return f"\n--- stacks of rank {rank}\n{dump.stdout[-3000:]}"

    def end(self) -> None:
        """End whatever still runs: ranks by pid, then their monitors, which end by themselves."""
        for pid in self.pids:
            if pid not in self.server.ended:
                for number in (signal.SIGCONT, signal.SIGKILL):
                    try:
                        os.kill(pid, number)
                    except ProcessLookupError:
                        break
                self.server.wait(pid, 10.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_keys = iter(range(1_000_000))


@contextmanager
def started(
    server: ForkServer,
    folder: Path,
    world_size: int,
    target: str,
    kwargs: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
) -> Iterator[Job]:
    """Start `world_size` ranks of `target` ("module:function", called with kwargs)."""
    key = f"job{next(_keys)}"
    port = str(free_port())
    pids = []
    job = Job(server, folder, pids, key)
    try:
        for rank in range(world_size):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "RESILIENCE_RUN_DIR": str(folder / "runs"),
                **(env or {}),
            }
            pids.append(server.start(f"{key}-{rank}", folder, target, dict(kwargs or {}), variables))
        yield job
    finally:
        job.end()
