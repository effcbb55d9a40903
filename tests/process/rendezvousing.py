"""Agents that meet, each in a process of its own, and directed by the test over a line.

An agent makes a handler and does what the test asks of it, one call at a time. It is forked from the fork
server and killed when the test ends, and its store process with it."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from resilience.core.agent_protocol import Protocol
from resilience.core.rendezvous import Rendezvous
from tests.support.ranks import free_port
from tests.support.server import ForkServer

_numbers = itertools.count()
LIMIT = 100.0  # seconds for an answer


class Seen(NamedTuple):
    """What a rendezvous told. store: what the cycle's own store held when this agent came to it."""

    cycle: int
    rank: int
    size: int
    address: tuple[str, int]
    store: list[str]
    seconds: float


class Agent:
    """The test's view of an agent."""

    def __init__(self, server: ForkServer, folder: Path, key: str, node: str, conf: dict[str, Any]) -> None:
        self.node = node
        self._server = server
        path = str(folder / f"{key}.line")
        with Listener(path, "AF_UNIX") as listener:
            self.pid = server.start(key, folder, f"{__name__}:be", {"path": path, "conf": conf}, {})
            self._line: Connection = listener.accept()
        self._is_dead = False

    def ask(self, name: str, *args: Any) -> Agent:
        """Have a method called; `answer` tells what came of it."""
        self._line.send((name, args))
        return self

    def answer(self, limit: float = LIMIT) -> Any:
        """Return what the method returned. Raises: what it raised."""
        assert self._line.poll(limit), f"agent {self.node} does not answer"
        is_well, value = self._line.recv()
        if not is_well:
            raise value
        return value

    def is_silent(self, seconds: float) -> bool:
        """Return whether nothing is answered for that long."""
        return not self._line.poll(seconds)

    def do(self, name: str, *args: Any) -> Any:
        return self.ask(name, *args).answer()

    def send_signal(self, number: int) -> None:
        assert self._server.wait(self.pid, 0.0) is None
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._is_dead = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._server.wait(self.pid, LIMIT)
        self._line.close()

    def end(self) -> None:
        if not self._is_dead:
            self.kill()


class Agents:
    """All agents of a test. conf: of the rendezvous, for all of them."""

    def __init__(self, server: ForkServer, folder: Path, nodes: str, **conf: Any) -> None:
        least, _, most = nodes.partition(":")
        liveness = {"keep_alive_interval": 0.2, "keep_alive_max_attempt": 3000}  # nobody is taken for lost
        self.conf = {
            "backend": "c10d",
            "endpoint": f"127.0.0.1:{free_port()}",
            "run_id": "job",
            "min_nodes": int(least),
            "max_nodes": int(most or least),
        } | liveness | conf  # fmt: skip
        self._server, self._folder = server, folder
        self._started: list[Agent] = []

    def start(self, node: str, **conf: Any) -> Agent:
        """Start an agent; its handler is made at once, and answers later."""
        key = f"agent{next(_numbers)}"
        agent = Agent(self._server, self._folder, key, node, self.conf | {"node": node} | conf)
        self._started.append(agent)
        return agent

    def several(self, count: int) -> list[Agent]:
        """Start agents a, b, c…; the first hosts the job's store."""
        first = self.start("a")
        first.answer()
        others = [self.start("bcdefgh"[number]) for number in range(count - 1)]
        for agent in others:
            agent.answer()
        return [first, *others]

    def store(self) -> dist.Store:
        """Look into what the agents write down for each other."""
        host, _, port = self.conf["endpoint"].partition(":")
        return dist.PrefixStore("resilience/job", dist.TCPStore(host, int(port), wait_for_workers=False))

    def await_entries(self, count: int) -> None:
        """Wait until the agents' log has so many entries."""
        store, deadline = self.store(), time.monotonic() + LIMIT
        # An agent takes the entry's place first, and then writes it.
        while store.add("log/count", 0) < count or not store.check([f"log/{count - 1}"]):
            assert time.monotonic() < deadline, f"the log has {store.add('log/count', 0)} entries, never {count}"

    def end(self) -> None:
        for agent in self._started:
            agent.end()


@contextlib.contextmanager
def agents(server: ForkServer, folder: Path, nodes: str, **conf: Any) -> Iterator[Agents]:
    """conf: of the rendezvous. Agents are killed at the end."""
    made = Agents(server, folder, nodes, **conf)
    try:
        yield made
    finally:
        made.end()


def meet(them: list[Agent]) -> list[Seen]:
    """Have them all ask for the next cycle; answers what each was told."""
    for agent in them:
        agent.ask("meet")
    return [agent.answer() for agent in them]


# -- in the agent's process ------------------------------------------------------------------------


def be(path: str, conf: dict[str, Any]) -> None:
    """Be an agent: do what the test asks until it hangs up."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from resilience.launcher.rendezvous.handler import Handler

    rank = conf.pop("infra_rank", None)
    line = Client(path)
    handler: Any = None
    name, args = "", ()
    while True:
        try:
            if handler is None:
                stop = Path(f"{conf['node']}.stop")
                handler = Handler(RendezvousParameters(**conf), rank=rank, is_interrupted=stop.exists)
                line.send((True, handler.is_host))
            else:
                line.send((True, _perform(handler, name, args)))
        except Exception as error:
            line.send((False, _plain(error)))
        try:
            name, args = line.recv()
        except EOFError:
            return


def _perform(handler: Any, name: str, args: tuple[Any, ...]) -> Any:
    if name == "meet":
        return _meet(handler)
    if name == "job_store":
        return getattr(handler.job_store, args[0])(*args[1:])
    if name in PROTOCOLS:
        return handler.run(PROTOCOLS[name](handler.rendezvous, *args))
    found = getattr(handler, name)
    return found(*args) if callable(found) else found


def _is_cycle_ended(rendezvous: Rendezvous) -> Protocol[bool]:
    has_end = (yield from rendezvous.cycle_end()) is not None
    return has_end or (yield from rendezvous.newest()).cycle > rendezvous.cycle


def _lost_nodes(rendezvous: Rendezvous) -> Protocol[list[str]]:
    lost = (yield from rendezvous.look("log/count")).lost
    return [seat.node for seat in rendezvous.membership.seats if seat.id in lost]


PROTOCOLS: dict[str, Callable[..., Protocol[Any]]] = {
    "cycle_end": Rendezvous.cycle_end,
    "end_cycle": Rendezvous.end_cycle,
    "exclude": Rendezvous.exclude,
    "is_cycle_ended": _is_cycle_ended,
    "lost_nodes": _lost_nodes,
}
"""What the supervision of a cycle asks the rendezvous, and a handler's torch interface does not."""


def _meet(handler: Any) -> Seen:
    began = time.monotonic()
    info = handler.next_rendezvous()
    took = time.monotonic() - began
    there = info.bootstrap_store_info
    store = dist.TCPStore(there.master_addr, there.master_port, wait_for_workers=False)
    found = [key for key in ("worker/0", "worker/1", "worker/2") if store.check([key])]
    info.store.add("through", 1)
    info.store.set(f"looked/{info.rank}", "1")
    info.store.wait([f"looked/{rank}" for rank in range(info.world_size)])
    store.set(f"worker/{info.rank}", "1")
    return Seen(handler.cycle, info.rank, info.world_size, (there.master_addr, there.master_port), found, took)


def _plain(error: Exception) -> Exception:
    """The error, if it can be pickled with its text alone."""
    return type(error)(str(error))
