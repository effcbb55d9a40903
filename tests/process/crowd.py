"""Many virtual ranks in few processes, each with all the store connections of a real rank and its monitor."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from resilience.core import restart
from resilience.core.restart import ENTRY, End, Keys, Result, RunStage, Stage, WaitLimits
from resilience.facts.interruptions import Interruption, InterruptionRecord, encode
from resilience.facts.seats import Seat
from resilience.inprocess._runtime.monitor_store import iteration_server
from resilience.inprocess.store import TCPStore, hosting
from resilience.system.store import drive, wait
from tests.support import signs

PREFIX = "call"
LIMIT = 300.0  # seconds
RANKS_A_NODE = 8
CONNECTIONS_A_RANK = 5  # its own, its watcher's, its monitor's, and one to the store of each of two iterations


def host(size: int, soft: int) -> dict[str, Any]:
    """Host the stores as the monitor of rank 0 does; return what it took."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.environ["WORLD_SIZE"] = str(size)
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_A_NODE)
    before = _open_files()
    with hosting(True):
        base = TCPStore()
    servers = [iteration_server("127.0.0.1") for _ in range(2)]
    store = dist.PrefixStore(PREFIX, base)
    for iteration, server in enumerate(servers):
        store.set(Keys(iteration).server, str(server.port))
    signs.hold("hosted", 0, LIMIT)
    return {
        "before": before,
        "used": _open_files(),
        "soft": soft,
        "raised": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def ranks(size: int, first: int, count: int) -> list[dict[str, float]]:
    """Be `count` ranks: meet, be interrupted by one of them, meet again, complete."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    everyone = [_Rank(number, size) for number in range(first, first + count)]
    threads = [threading.Thread(target=rank.run) for rank in everyone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    signs.hold("completed", first, LIMIT)  # with every connection open
    return [rank.took for rank in everyone]


class _Rank:
    """One virtual rank. took: when it reached each point, in monotonic seconds."""

    def __init__(self, number: int, world_size: int) -> None:
        self._number = number
        self._world_size = world_size
        self._groups: list[Any] = []
        self.took: dict[str, float] = {}

    def run(self) -> None:
        with hosting(False):
            base, watch, self._monitor = (TCPStore() for _ in range(3))
            self._supervision = None if self._number % RANKS_A_NODE else TCPStore()
        self._store, self._watch = dist.PrefixStore(PREFIX, base), dist.PrefixStore(PREFIX, watch)
        limits = WaitLimits(LIMIT, LIMIT, LIMIT)
        self.took["connected"] = time.monotonic()
        drive(restart.enter(self._seat(ENTRY), limits), self._store, self._perform, chunk=LIMIT)
        self.took["entered"] = time.monotonic()
        for iteration in range(2):
            self._iteration = iteration
            ending = drive(restart.iterate(self._seat(iteration), limits), self._store, self._perform, chunk=LIMIT)
            self.took[ending.outcome] = time.monotonic()

    def _seat(self, iteration: int) -> Seat:
        return Seat(self._number, self._number, self._world_size, self._world_size, iteration)

    def _perform(self, operation: restart.Operation) -> Any:
        match operation:
            case RunStage(Stage.INITIALIZE):
                port = int(self._store.get(Keys(self._iteration).server))
                self._groups.append(dist.TCPStore("127.0.0.1", port, wait_for_workers=False))
            case RunStage(Stage.FUNCTION) if self._iteration == 0:
                return self._fail() if self._number == self._world_size // 2 else self._be_interrupted()
            case RunStage():
                pass
            case _:
                return NotImplemented
        return Result(End.RETURNED)

    def _fail(self) -> Result:
        """Wait until all are in the function, then fail."""
        while self._groups[0].add("inside", 0) < self._world_size - 1:
            time.sleep(0.01)
        self.took["failed"] = time.monotonic()
        return Result(End.FAILED, encode(InterruptionRecord(self._number, Interruption.EXCEPTION, iteration=0)))

    def _be_interrupted(self) -> Result:
        self._groups[0].add("inside", 1)
        assert wait(self._watch, Keys(0).outcome, LIMIT, LIMIT)
        return Result(End.INTERRUPTED)


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
