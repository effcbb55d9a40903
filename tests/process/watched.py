"""Workers under rank monitors, as an agent has them, without the agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from resilience.facts.events import Event, MonitorEnded
from resilience.facts.identity import Origin
from resilience.facts.limits import Limits
from resilience.facts.records import Record
from resilience.launcher.monitors import Message, Monitors
from resilience.monitor import messages
from tests.support.account import Account
from tests.support.server import ROOT

LIMIT = 200.0  # seconds that anything may take
KEEP_LIMIT = 60.0  # seconds for the disk to have the last records of a watch
NONE = Limits()

Kind = TypeVar("Kind")


class Node:
    """Monitors, the workers beside them, and what was heard."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.monitors = Monitors(folder, "node", size)
        self.workers: list[subprocess.Popen[str]] = []
        self.heard: list[tuple[int, Message]] = []
        self.account = Account(folder)
        self.monitors.start()

    def start(self, code: str, limits: Limits = NONE, local_rank: int = 0, **env: str) -> subprocess.Popen[str]:
        """Start a worker that runs `code`, and have it watched."""
        worker = self.run(code, local_rank, **env)
        self.assign(worker.pid, limits, local_rank)
        return worker

    def run(self, code: str, local_rank: int = 0, **env: str) -> subprocess.Popen[str]:
        """Start a worker and tell nobody."""
        worker = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"RESILIENCE_MONITOR_SOCKET": self.monitors.socket(local_rank)} | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.workers.append(worker)
        return worker

    def assign(self, pid: int, limits: Limits = NONE, local_rank: int = 0, output: tuple[str, ...] = ()) -> None:
        """Have a worker watched."""
        origin = Origin("job", "node", "rank", pid, initial_rank=local_rank, rank=local_rank, world_size=2)
        self.monitors.assign(local_rank, pid, origin, limits, output)

    def hear(self, kind: type[Kind], where: Callable[[Kind], bool] = lambda message: True) -> Kind:
        """Wait until a monitor says something, and return it; at once if it was said before."""
        deadline = time.monotonic() + LIMIT
        while True:
            for _, message in self.heard:
                if isinstance(message, kind) and where(message):
                    return message
            assert time.monotonic() < deadline, f"no {kind.__name__}; heard: {self.heard}"
            self.heard += self.monitors.poll(0.2)

    def said(self, kind: type[Kind]) -> list[Kind]:
        """What was heard so far."""
        return [message for _, message in self.heard if isinstance(message, kind)]

    def records(self, kind: type[Event]) -> list[Record]:
        """What stands on record of this kind. The disk gets the last records of a watch after the agent has heard of
        its end."""
        deadline = time.monotonic() + KEEP_LIMIT
        while len(self._on_record(MonitorEnded)) < len(self.said(messages.Gone)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._on_record(kind)

    def _on_record(self, kind: type[Event]) -> list[Record]:
        return [record for record in self.account.records() if isinstance(record.event, kind)]

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Listen to the monitors until something holds."""
        deadline = time.monotonic() + LIMIT
        while not holds():
            assert time.monotonic() < deadline, f"it does not hold; heard: {self.heard}"
            self.heard += self.monitors.poll(0.05)

    def await_record(self, kind: type[Event], where: Callable[[Any], bool] = lambda event: True) -> Record:
        """Wait until it stands on record, listening to the monitors meanwhile."""
        deadline = time.monotonic() + LIMIT
        while True:
            for record in self._on_record(kind):
                if where(record.event):
                    return record
            assert time.monotonic() < deadline, f"no {kind.__name__} on record"
            self.heard += self.monitors.poll(0.05)

    def end(self) -> None:
        for worker in self.workers:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.communicate()
        self.monitors.close(5.0)


@contextmanager
def node(folder: Path, size: int = 1) -> Iterator[Node]:
    """A node whose processes end with the body."""
    made = Node(folder, size)
    try:
        yield made
    finally:
        made.end()


def await_line(worker: subprocess.Popen[str]) -> str:
    """Return what the worker prints next."""
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


def let_on(worker: subprocess.Popen[str]) -> None:
    """Let a worker that reads a line go on."""
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
