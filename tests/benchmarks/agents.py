"""What do a thousand agents cost the job's store?  Real agents without workers, on one real store.

`python -m tests.benchmarks.agents --agents 1000` lets that many agents of the launcher meet, wait as they do while
workers run, and meet again, as after a failure. The store is a process as the launcher has it; the agents are threads
of a few processes. Printed: requests, bytes and the store's CPU time for each phase. A task, not a test: it needs some
minutes and 2 GiB."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters

from resilience.core.agent_protocol import HighestStep, NodeProtocol
from resilience.core.budget import Budget
from resilience.core.cycle import CycleDecision
from resilience.core.supervision import Rules, Supervision, WorkerStates
from resilience.launcher.rendezvous import handler as rendezvous
from resilience.launcher.rendezvous import job_store
from resilience.launcher.rendezvous.handler import Handler
from resilience.launcher.rendezvous.job_store import RendezvousStore
from resilience.launcher.rendezvous.stores import Hosted, StoreProcess
from resilience.system import descriptors, patience
from resilience.system.open_sockets import Connection
from resilience.system.processes import ignore_job_signals

T = TypeVar("T")
PROCESSES = 4
LOOK_EVERY = 0.5  # seconds between two looks of an agent at its workers here; they cost the store nothing
COUNTED = ("set", "get", "add", "check", "wait", "compare_set", "multi_get", "delete_key")


class Counted:
    """A client of the store that counts its requests and the bytes of keys and values."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self._store = store
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in COUNTED:
            return method

        def call(*arguments: Any) -> Any:
            self._counts["requests"] += 1
            self._counts[name] += 1
            answer = method(*arguments)
            self._counts["bytes"] += size(arguments) + size(answer)
            return answer

        return call


def size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple):
        return sum(map(size, value))
    return 8


class NoStores:
    """In place of an agent's store process: here no worker needs the cycle's own store."""

    pid = 0
    is_alive = True

    def ask(self, address: str) -> None:
        pass

    def take(self) -> Hosted:
        return Hosted(29500, address="127.0.0.1")

    def release(self, port: int) -> None:
        pass


class Agent(threading.Thread):
    """One agent: meets, looks around until the cycle ends, and meets again, for `cycles` cycles."""

    def __init__(self, number: int, count: int, cycles: int, counts: Counter[str], board: Any) -> None:
        super().__init__(daemon=True)
        parameters = RendezvousParameters("c10d", "here:1", "job", count, count, join_timeout=600)
        self.handler = Handler(parameters, NoStores(), f"node{number:04d}")  # type: ignore[arg-type]
        self._supervision = Supervision(self.handler.rendezvous, Rules("any-failed", Budget(9)), hosts_store=False)
        self.handler.join = lambda seat: self._run(self._supervision.join(seat))
        self._cycles, self._board = cycles, board
        self._is_first = number == 0

    def _run(self, protocol: NodeProtocol[T]) -> T:
        return self.handler.run_for_node(protocol, lambda operation: 0 if isinstance(operation, HighestStep) else None)

    def run(self) -> None:
        handler, supervision = self.handler, self._supervision
        for cycle in range(self._cycles):
            handler.next_rendezvous()
            assert self._run(supervision.began()) is None
            with self._board.get_lock():
                self._board[cycle] += 1
            verdict = None
            while verdict is None:
                time.sleep(LOOK_EVERY)
                verdict = self._run(supervision.look(WorkerStates(are_living=True)))
                if self._is_first and self._board[self._cycles] > cycle:
                    verdict = self._run(supervision.agree(CycleDecision("interrupted", "node0000", again="membership")))


def be_agents(first: int, last: int, count: int, cycles: int, port: int, board: Any, line: Any) -> None:
    """Run agents in this process, and report its requests when asked."""
    descriptors.raise_limit()
    threading.stack_size(512 * 1024)
    counts: Counter[str] = Counter()

    def connect() -> Any:
        return Counted(job_store.connect("127.0.0.1", port, 60.0), counts)

    rendezvous.meet = lambda *_: RendezvousStore(connect, ("127.0.0.1", port), "127.0.0.1")  # type: ignore[assignment]
    Prefix.install()
    # An agent finds its new connection among all of its process: here among those of hundreds of agents, which takes
    # minutes of the CPU that they share.
    patience.opened_by = lambda make: (make(), [Connection(-1, -1, port)])  # type: ignore[assignment]
    agents = [Agent(number, count, cycles, counts, board) for number in range(first, last)]
    line.send(None)
    line.recv()
    for agent in agents:
        agent.start()
    while True:
        line.recv()
        line.send(dict(counts))


class Prefix:
    """In place of torch's PrefixStore, which takes no client that counts: there is one job here."""

    @staticmethod
    def install() -> None:
        dist.PrefixStore = lambda _, store: store  # type: ignore[assignment, misc]


def cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0, help="of waiting in each cycle")
    parser.add_argument("--cycles", type=int, default=3)
    options = parser.parse_args(arguments)
    count, cycles = options.agents, options.cycles
    descriptors.raise_limit()
    ignore_job_signals()
    stores = StoreProcess.start()
    hosted = stores.host()
    context = get_context("spawn")
    board = context.Array("i", cycles + 1)
    bounds = [count * share // PROCESSES for share in range(PROCESSES + 1)]
    lines, processes = [], []
    try:
        for first, last in pairwise(bounds):
            ours, theirs = context.Pipe()
            arguments_ = (first, last, count, cycles, hosted.port, board, theirs)
            process = context.Process(target=be_agents, args=arguments_, daemon=True)
            process.start()
            processes.append(process)
            lines.append(ours)
        for line in lines:
            line.recv()
        measure(lines, stores.pid, board, options)
    finally:
        for process in processes:
            if process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
        stores.close()
    return 0


def measure(lines: list[Any], store: int, board: Any, options: argparse.Namespace) -> None:
    def total() -> Counter[str]:
        counts: Counter[str] = Counter()
        for line in lines:
            line.send("how many?")
            counts.update(line.recv())
        return counts

    def phase(name: str, wait: Callable[[], None], began: Callable[[], None] = lambda: None) -> None:
        counts, used, at = Counter[str](), cpu(store), time.monotonic()
        if is_running:
            counts = total()
        began()
        wait()
        seconds, new = time.monotonic() - at, total() - counts
        used = cpu(store) - used
        print(
            f"{name}: {seconds:.1f} s; {new['requests']:,} requests, {new['requests'] / options.agents:.1f} an agent, "
            f"{new['requests'] / options.agents / seconds:.2f} an agent and second; {new['bytes'] / 1e6:.2f} MB, "
            f"{new['bytes'] / options.agents:,.0f} bytes an agent; CPU of the store {used:.2f} s, "
            f"{100 * used / seconds:.1f} % of a core"
        )
        kinds = ", ".join(f"{kind} {new[kind] / options.agents:.1f}" for kind in COUNTED if new[kind])
        print(f"  an agent: {kinds}", flush=True)

    def all_in(cycle: int) -> Callable[[], None]:
        def wait() -> None:
            deadline = time.monotonic() + 400
            while board[cycle] < options.agents:
                if time.monotonic() > deadline:
                    raise SystemExit(f"{board[cycle]} of {options.agents} agents came to cycle {cycle} in 400 s")
                time.sleep(0.05)

        return wait

    def start() -> None:
        for line in lines:
            line.send("go")

    is_running = False
    for cycle in range(options.cycles):
        if cycle == 0:
            phase("first membership", all_in(0), start)
            is_running = True
        else:

            def end(cycle: int = cycle) -> None:
                board[options.cycles] = cycle

            phase(f"restart {cycle}", all_in(cycle), end)
        phase("  workers run", lambda: time.sleep(options.seconds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
