"""Which nodes take part in the next cycle, and which store do they use?  The agents' rendezvous, in torch's interface.

Agents meet in the job's store (`job_store`). `core.rendezvous` decides what they write there and what follows;
this module performs it. Each agent keeps a store ready for the next cycle, and the cycle uses the store of group rank
0, so a cycle never sees keys of another cycle. We do not use torch's own state machine, because it polls once per
second, compares wall clocks of hosts, unpickles data from the network, and forms a smaller cycle only after a last call
of 30 s."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from resilience.core.agent_liveness import LEASE, count_every
from resilience.core.agent_protocol import NodeOperation, NodeProtocol, Protocol
from resilience.core.control import Policy
from resilience.core.membership import FIRST, Membership, NodeSeat
from resilience.core.rendezvous import LEAVE_LIMIT, Refusal, Rendezvous
from resilience.core.restart import Add
from resilience.core.terms import agree
from resilience.errors import ConfigurationError, LaunchError, StoreError
from resilience.launcher.rendezvous.agent_heartbeat import AgentHeartbeat
from resilience.launcher.rendezvous.conf import number, terms_of
from resilience.launcher.rendezvous.driving import Driver, T
from resilience.launcher.rendezvous.job_store import meet, rank_of
from resilience.launcher.rendezvous.key_watch import KeyWatch
from resilience.launcher.rendezvous.store_news import StoreNews, StoreProcessNews
from resilience.launcher.rendezvous.stores import StoreProcess
from resilience.system.environment import node_name
from resilience.system.store import execute


class Handler(RendezvousHandler):
    """The rendezvous of one agent. Main thread only.

    stores: the agent's store process; by default one is started here, and ended here. node: this node's name, the same
    when the node comes back; rank: its place in the infrastructure's order, None for a deterministic one;
    is_interrupted: polled while waiting; True ends the wait; is_hurried: the same while the others leave this node's
    store, by default is_interrupted; is_asked_to_stop: called in a thread, True once the agent was asked to stop, also
    while the main thread waits for the store in C++, by default is_interrupted; policy: of restarts; say: called with a
    sentence for the terminal before a long wait. Keys of `--rdzv-conf`: inner, is_host, node, join_timeout 600,
    last_call_timeout 30, keep_alive_interval 2, keep_alive_max_attempt 4 (seconds, and the number of intervals that an
    agent may be silent), store_timeout 120 (seconds that the host of the job's store waits for it).
    Raises: ConfigurationError, also if the job's first agent has other settings; StoreError if the job's store cannot
    be hosted or reached; LaunchError."""

    def __init__(
        self,
        parameters: RendezvousParameters,
        stores: StoreProcess | None = None,
        node: str | None = None,
        rank: int | None = None,
        is_interrupted: Callable[[], bool] = lambda: False,
        workers: int = 1,
        role: str = "",
        is_hurried: Callable[[], bool] | None = None,
        is_asked_to_stop: Callable[[], bool] | None = None,
        policy: Policy = "any-failed",
        say: Callable[[str], object] = lambda sentence: None,
    ) -> None:
        self._parameters = parameters
        terms = terms_of(parameters, policy)
        node = node or str(parameters.get("node") or node_name())
        self.rendezvous = Rendezvous(f"{node}/{uuid.uuid4().hex[:12]}", node, terms)
        self._rank = rank_of(parameters, rank)
        self._workers, self._role = workers, role
        self._owns_stores, self._stores = stores is None, stores or StoreProcess.start()
        self._rendezvous_store = meet(parameters, self._stores, terms.join_limit, is_interrupted)
        self.rendezvous.has_lasting_store = self._rendezvous_store.forget is not None
        limit = number(parameters, "store_timeout", 120) / LEASE if self.is_host else terms.lost_after
        pause = count_every(terms.interval, terms.lost_after, limit)
        self._news = StoreNews()
        # A client may reconnect; a cut-off agent may not.
        self.watch = KeyWatch(self._connect)
        begin = partial(self._connect_and_count, pause, limit, is_asked_to_stop or is_interrupted)
        self._store, self._heartbeat = self._rendezvous_store.answer(begin, terms.join_limit, is_interrupted)
        self._heartbeat.start()
        self._driver = Driver(self._store, is_interrupted, lambda: self.why_cut_off, self.watch)
        self._is_interrupted, self._say = is_interrupted, say
        self._patient_driver = Driver(self._store, is_hurried or is_interrupted, lambda: self.why_cut_off, self.watch)
        self.leave_limit = LEAVE_LIMIT  # seconds that the others may take to leave a job that is over
        self.job_store: Any = dist.PrefixStore("job", self._store)
        self._stores.ask(self._rendezvous_store.address)  # for the first cycle, while we wait for other nodes
        self._seat: NodeSeat | None = None
        self._cycle_store_port: int | None = None  # port of the running cycle's store if we host it
        self._has_left = False
        self._probe_client: Any = None
        # How this agent joins. A supervised agent also decides whether the job goes on: `CycleSupervisor`.
        self.join: Callable[[NodeSeat], Membership | Refusal] = lambda seat: self.run(self.rendezvous.join(seat))
        # How it stops a job that continues without it, but needs its store.
        self.stop_job: Callable[[], object] = lambda: self.set_closed("the node that hosts the store was asked to stop")
        self._agree_on_terms()

    # -- torch's interface ------------------------------------------------------------------------

    def get_backend(self) -> str:
        """Return the backend name that this handler was created for."""
        return self._parameters.backend

    @property
    def use_agent_store(self) -> bool:
        """Return True: workers find our store at MASTER_ADDR and MASTER_PORT and host none."""
        return True

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._parameters.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next cycle: wait for its nodes, and for a place.

        The returned store is for agents; workers use the one in `bootstrap_store_info`.
        Raises: RendezvousClosedError (also if this node is excluded or must stop waiting),
        RendezvousTimeoutError, RendezvousConnectionError; ConfigurationError if the ranks are wrong."""
        with _as_torch():
            membership = self._join()
        rank = membership.rank_of(self.id)
        assert rank is not None
        host = membership.seats[0]
        return RendezvousInfo(
            dist.PrefixStore(f"agents/{membership.cycle}", self._store),
            rank,
            len(membership.seats),
            RendezvousStoreInfo(self._rendezvous_store.addresses.get(host.address, host.address), host.port),
        )

    def is_closed(self) -> bool:
        """Return True if there will be no further cycle. Raises: RendezvousConnectionError."""
        with _as_torch():
            return bool(self.last_words())

    def set_closed(self, reason: str = "the job is over") -> None:
        """Close the rendezvous: there will be no further cycle. Raises: RendezvousConnectionError."""
        with _as_torch():
            self.run(self.rendezvous.close(reason))

    def num_nodes_waiting(self) -> int:
        """Return how many more nodes a new cycle would include now: nodes with a free place, and nodes of this cycle
        that have finished with it. 0 after the rendezvous is closed.

        Raises: RendezvousConnectionError."""
        with _as_torch():
            return self.run(self.rendezvous.waiting())

    def shutdown(self, reason: str = "the job is over") -> bool:
        """Close the rendezvous for all and leave it; see `leave`. An agent without a place in a running job only
        leaves, because the others do not need it."""
        if not self._has_left:
            try:
                if self._is_seated_or_first():
                    self.set_closed(reason)
            except RendezvousConnectionError:
                pass  # its host is gone, which has closed it
        return self.leave()

    # -- what torch does not have -----------------------------------------------------------------

    @property
    def id(self) -> str:
        """Return the name of this agent; no other agent ever has it."""
        return self.rendezvous.id

    @property
    def node(self) -> str:
        """Return the name of this node, the same when the node comes back."""
        return self.rendezvous.node

    @property
    def interval(self) -> float:
        """Return the seconds between two checks of other agents."""
        return self.rendezvous.terms.interval

    @property
    def cycle(self) -> int:
        """Return the number of this agent's current or last cycle; counts from 0 for the job, -1 before the first."""
        return self.rendezvous.cycle

    @property
    def membership(self) -> Membership:
        """Return the members of the cycle."""
        return self.rendezvous.membership

    def run(self, protocol: Protocol[T]) -> T:
        """Run a protocol of this agent on the job's store. Raises: StoreError."""
        return self._driver.run(protocol)

    def run_for_node(self, protocol: NodeProtocol[T], perform: Callable[[NodeOperation], Any]) -> T:
        """Run a protocol that asks for more than the job's store, which `perform` does. Raises: StoreError."""
        return self._driver.run_for_node(protocol, perform)

    @property
    def is_host(self) -> bool:
        """Return True if this node's store process hosts the job's store."""
        return self._rendezvous_store.is_host

    @property
    def store_address(self) -> str:
        """Return host and port of the job's store."""
        return self._rendezvous_store.server

    @property
    def store_pid(self) -> int:
        """Return the pid of this agent's store process."""
        return self._stores.pid

    @property
    def is_cycle_store_gone(self) -> bool:
        """Return True if the cycle uses this node's store, and the process that hosts it has died."""
        return self._cycle_store_port is not None and not self._stores.is_alive

    def store_news(self) -> list[StoreProcessNews]:
        """Return what happened to this node's store process since the last call. A lost one is replaced, unless the
        job's store is lost with it."""
        if self._news.note_loss(self._stores, self.is_host, self.is_cycle_store_gone) and not self.is_host:
            with contextlib.suppress(StoreError, LaunchError):  # no resources now: the next `_join` tries again
                self._replace_stores()
        return self._news.take()

    @property
    def time_left(self) -> float | None:
        """Return the seconds until the others may continue without this node; None unless it is cut off from the job's
        store: no answer for most of the time after which others consider it lost. A cut-off node takes no further
        part."""
        return self._heartbeat.time_left

    @property
    def why_cut_off(self) -> str:
        """Return why this agent is cut off from the job's store, empty if it is not."""
        if self.time_left is None:
            return ""
        if self.is_host:
            reason = "after a signal to this agent" if self._heartbeat.is_shortened else "store_timeout"
            return f"its process {self.store_pid} here did not answer for {self._heartbeat.lease:g} s ({reason})"
        return (
            f"it did not answer for {self._heartbeat.lease:g} s; the other nodes consider a node lost after "
            f"{self.rendezvous.terms.lost_after:g} s (--rdzv-conf keep_alive_interval, keep_alive_max_attempt)"
        )

    def is_taken_for_lost(self) -> bool:
        """Return True if others consider this agent lost, for example after it was suspended. Raises: StoreError."""
        return self.run(self.rendezvous.is_taken_for_lost())

    def last_words(self) -> str:
        """Return why the rendezvous is closed, empty if it is not. Raises: StoreError."""
        return self.run(self.rendezvous.newest()).closed

    def probe(self) -> None:
        """Send the job's store one request over a separate connection. Any thread, one at a time.

        Raises: StoreError."""
        if self._probe_client is None:
            self._probe_client = self._connect()
        execute(Add("probe", 0), self._probe_client)

    def turn_away(self, reason: str) -> None:
        """End a job that cannot start, with the same reason on all nodes. The agent whose node hosts the job's store
        says that and waits until as many nodes as the job needs have read the reason, 300 s at most."""
        others = self.rendezvous.terms.least - 1
        if self.is_host and others:
            self._say(f"{reason}. This node exits when the other nodes have read this, after 300 s at most")
        with contextlib.suppress(RendezvousConnectionError):
            self.set_closed(reason)
        self.leave(reason, others)

    def leave(self, reason: str = "", expected: int = 0) -> bool:
        """Leave the rendezvous without closing it for others; return True on success.

        The agent whose node hosts the job's store waits until the others have left or are lost: without limit while
        the job continues, `leave_limit` at most after it is over. A signal stops a job that continues, and only a
        person's second signal ends the wait. expected: at least this many others must have left,
        including agents that have not arrived yet."""
        if self._has_left:
            return True
        self._has_left = True
        try:
            self.run(self.rendezvous.leave(reason))
            self._await_leaving(expected)
        except (StoreError, OSError):
            return False
        finally:
            self.watch.close(ends_store=self.is_host)
            self._heartbeat.stop()
            if self._owns_stores:
                self._stores.close()
        return True

    # -- small parts ------------------------------------------------------------------------------

    def _agree_on_terms(self) -> None:
        """Leave if another agent of the job came first and has other settings. The job continues without this agent,
        unless it hosts the job's store: then the job cannot start. Raises: ConfigurationError, StoreError."""
        try:
            self.run(agree(self.node, self.rendezvous.terms))
        except ConfigurationError as error:
            if self.is_host:
                self.turn_away(str(error))
            self.leave(str(error))
            raise

    def _is_seated_or_first(self) -> bool:
        """Return True if this agent has a place in the cycle, or if there was none yet."""
        with _as_torch():
            newest = self.run(self.rendezvous.newest())
        return newest.cycle == FIRST or self.membership.rank_of(self.id) is not None

    def _join(self) -> Membership:
        """Wait until this agent has a place in a cycle. Raises: RendezvousClosedError, RendezvousTimeoutError,
        StoreError, LaunchError."""
        if not self.is_host and not self._stores.is_alive:
            self._replace_stores()
        if self._seat is None:
            port, address = self._take_port(), self._rendezvous_store.address
            self._seat = NodeSeat(self.id, self.node, address, port, self._rank, self._workers, self._role)
        result = self.join(self._seat)
        if isinstance(result, Refusal):
            raise (RendezvousTimeoutError if result.kind == "late" else RendezvousClosedError)(result.why)
        self._prepare_next(self._seat.port if result.seats[0].id == self.id else None)
        return result

    def _prepare_next(self, used: int | None) -> None:
        """Close the previous cycle's store; open one for the next cycle if the new cycle uses ours.

        used: port of our store if the new cycle uses it."""
        if self._cycle_store_port is not None:
            self._stores.release(self._cycle_store_port)
        self._cycle_store_port = used
        if used is not None:
            self._seat = None
            with contextlib.suppress(StoreError):  # the process is gone, which the next `_join` notices
                self._stores.ask(self._rendezvous_store.address)

    def _take_port(self) -> int:
        """Return the port of our store for the next cycle. Raises: LaunchError; StoreError if the job's store is lost
        too."""
        try:
            try:
                return self._stores.take().port
            except StoreError as error:
                if not self.is_host:
                    self._replace_stores()
                elif self._cycle_store_port is not None and getattr(error, "lacks_descriptors", False):
                    # The last cycle is over here: its store gives back the descriptors that this one lacks.
                    self._stores.release(self._cycle_store_port)
                    self._cycle_store_port = None
                    self._stores.ask(self._rendezvous_store.address)
                else:
                    raise
                return self._stores.take().port
        except StoreError as error:
            if self.is_host and not self._stores.is_alive:
                raise
            raise LaunchError(f"no store for the next cycle could be opened here: {error}") from error

    def _replace_stores(self) -> None:
        """Start another store process after ours has died. The job's store is elsewhere."""
        self._news.note_loss(self._stores, self.is_host, self.is_cycle_store_gone)
        self._stores.close()
        self._stores, self._owns_stores = StoreProcess.start(), True
        self._seat = self._cycle_store_port = None
        self._stores.ask(self._rendezvous_store.address)

    def _connect_and_count(self, pause: float, limit: float, asked: Callable[[], bool]) -> tuple[Any, AgentHeartbeat]:
        """Connect to the job's store and count once. Raises: StoreError."""
        store, cut = self._connect(), self._rendezvous_store.cut

        def look_after_store() -> None:
            self._news.resume(self._stores)

        return store, AgentHeartbeat(self._connect, self.id, pause, limit, cut, asked, look_after_store)

    def _connect(self) -> Any:
        return dist.PrefixStore(f"resilience/{self.get_run_id()}", self._rendezvous_store.connect())

    def _await_leaving(self, expected: int = 0) -> None:
        """If we host the job's store: wait until no agent needs it. If it is in etcd and we are the last agent of a
        finished job: delete its keys."""
        forget = self._rendezvous_store.forget
        if forget is not None and self.run(self.rendezvous.await_leaving(False, expected)):
            forget()
        if not self.is_host:
            return
        until = time.monotonic() + self.leave_limit
        self.run(self.rendezvous.await_leaving(True, expected, self.leave_limit))
        if self._is_interrupted() and not expected:  # else no worker of another node can be at work
            if not self.last_words():
                self.stop_job()
                until = time.monotonic() + self.leave_limit
            left = max(0.0, until - time.monotonic())
            self._patient_driver.run(self.rendezvous.await_leaving(True, expected, left))
        self.run(self.rendezvous.wake())  # also this agent, whose wait would otherwise fail with the store


@contextlib.contextmanager
def _as_torch() -> Iterator[None]:
    """Raise the exception that torch's callers expect when the store is gone."""
    try:
        yield
    except StoreError as error:
        raise RendezvousConnectionError(str(error)) from error
