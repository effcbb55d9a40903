"""Which other jobs use the store that this node hosts, and how long do they need it?

Jobs with different ids may share an endpoint. The first agent on its host hosts the store, and the store ends with that
agent's node. So this agent stays until the other jobs are over. Each job that is a client of the store adds its id to
one list there. `core.rendezvous` waits for a job's agents, as it does for those of this node's own job."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from resilience.core.agent_protocol import Protocol
from resilience.core.rendezvous import Rendezvous
from resilience.core.shared_list import SharedList
from resilience.core.terms import read
from resilience.launcher.rendezvous.driving import Driver
from resilience.launcher.rendezvous.key_watch import KeyWatch


def of_job(run_id: str, store: Any) -> Any:
    """Return the part of a store that a job uses."""
    return dist.PrefixStore(f"resilience/{run_id}", store)


class OtherJobs:
    """The jobs of one store. Main thread only. Every method may raise StoreError."""

    def __init__(
        self,
        run_id: str,
        connect: Callable[[], Any],
        is_interrupted: Callable[[], bool],
        why_cut_off: Callable[[], str],
    ) -> None:
        """run_id: of this agent's job; connect: returns a new client of the whole store; is_interrupted: ends a wait;
        why_cut_off: as for `Driver`."""
        self._run_id = run_id
        self._connect = connect
        self._is_interrupted = is_interrupted
        self._why_cut_off = why_cut_off
        self._list = SharedList("job")
        self._known: list[str] = []

    def add_own(self) -> None:
        """Let the host of the store know this agent's job."""
        self._driver().run(self._list.append(self._run_id, self._is_listed))

    def await_end(self, node: str, limit: float, say: Callable[[str], object]) -> None:
        """Wait until no agent of another job needs the store, or this agent is interrupted. node: this node's name;
        limit: seconds that the agents of a job may take to leave once it is over; say: prints a line."""
        driver, served = self._driver(), 0
        driver.run(self._is_listed())
        while served < len(self._known):
            run_id = self._known[served]
            if run_id != self._run_id:
                self._await_job(run_id, node, limit, say)
            served += 1
            driver.run(self._is_listed())

    def _await_job(self, run_id: str, node: str, limit: float, say: Callable[[str], object]) -> None:
        watch = KeyWatch(lambda: of_job(run_id, self._connect()))
        try:
            driver = Driver(of_job(run_id, self._connect()), self._is_interrupted, self._why_cut_off, watch)
            terms = driver.run(read())
            if terms is None:
                return
            observer = Rendezvous(f"{node}/{uuid.uuid4().hex[:12]}", node, terms)
            if not self._is_interrupted() and driver.run(observer.has_agents()):
                say(f"this job is over, but job {run_id} uses the store that this node hosts: waiting for its end")
                driver.run(observer.await_leaving(True, limit=limit))
        finally:
            watch.close()

    def _driver(self) -> Driver:
        store = dist.PrefixStore("resilience-jobs", self._connect())
        return Driver(store, self._is_interrupted, self._why_cut_off)

    def _is_listed(self) -> Protocol[bool]:
        """Read new ids. Return True if this agent's job is among all ids."""
        self._known += yield from self._list.read()
        return self._run_id in self._known
