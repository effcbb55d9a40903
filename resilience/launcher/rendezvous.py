"""Who takes part in the next cycle, and with which store?  The rendezvous of agents, behind torch's interface.

Agents meet in the job's store (`meeting`). What they write there, and what follows from it, is `core.rendezvous`; this
is the shell that performs it. Each agent holds a store ready for the next cycle, and that of group rank 0 is taken: a
cycle never sees keys of another. torch's own state machine is not used: it polls once a second, compares wall clocks
of hosts, unpickles what it reads from the network, and forms a smaller cycle only after a last call of 30 s."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Collection, Iterator
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

from resilience.adapters.environment import node_name
from resilience.adapters.store import execute
from resilience.core.agent_liveness import LEASE
from resilience.core.agent_protocol import Emit, HighestStep, Protocol
from resilience.core.gathering import Around, Formation, Seat
from resilience.core.rendezvous import Refusal, Rendezvous, Terms
from resilience.core.restart import Add
from resilience.errors import StoreError
from resilience.launcher.beats import Beating
from resilience.launcher.driving import Driver, T
from resilience.launcher.key_watch import KeyWatch
from resilience.launcher.meeting import meet, rank_of, seconds
from resilience.launcher.stores import StoreProcess


class Handler(RendezvousHandler):
    """The rendezvous of one agent. Main thread only.

    stores: the agent's store process; made here if none is given, and then ended here. node: this node's name, the
    same when it comes back; rank: its place in the infrastructure's order, None for a deterministic one;
    is_interrupted: asked while waiting, True ends the wait. Of `--rdzv-conf`: inner, is_host, node, join_timeout 600,
    last_call_timeout 30, keep_alive_interval 2, keep_alive_max_attempt 4 (seconds, and how many intervals an agent
    may be silent), store_timeout 120 (seconds that the host of the job's store waits for it).
    Raises: ConfigurationError; StoreError if the meeting place cannot be made or reached."""

    def __init__(
        self,
        parameters: RendezvousParameters,
        stores: StoreProcess | None = None,
        node: str | None = None,
        rank: int | None = None,
        is_interrupted: Callable[[], bool] = lambda: False,
        workers: int = 1,
        role: str = "",
    ) -> None:
        self._parameters = parameters
        interval = seconds(parameters, "keep_alive_interval", 2)
        terms = Terms(
            parameters.min_nodes,
            parameters.max_nodes,
            seconds(parameters, "join_timeout", 600),
            seconds(parameters, "last_call_timeout", 30),
            interval,
            interval * seconds(parameters, "keep_alive_max_attempt", 4),
        )
        node = node or str(parameters.get("node") or node_name())
        self.rendezvous = Rendezvous(f"{node}/{uuid.uuid4().hex[:12]}", node, terms)
        self._rank = rank_of(parameters, rank)
        self._workers, self._role = workers, role
        self._owns_stores = stores is None
        self._stores = stores or StoreProcess.start()
        self._meeting = meet(parameters, self._stores, terms.join_limit, is_interrupted)
        self._store: Any = self._connect()
        limit = seconds(parameters, "store_timeout", 120) / LEASE if self.is_host else terms.lost_after
        self._beating = Beating(self._connect, self.id, interval, limit, self._meeting.cut)
        # A client may come back, this agent may not.
        self.watch = KeyWatch(self._connect)
        self._driver = Driver(self._store, is_interrupted, lambda: self.why_cut_off, self.watch)
        self.job_store: Any = dist.PrefixStore("job", self._store)
        self._stores.ask(self._meeting.address)  # for the first cycle, while others are waited for
        self._seat: Seat | None = None
        self._serving: int | None = None  # port of the store of the cycle that runs, if it is ours
        self._has_left = False
        self._probing: Any = None

    # -- torch's interface ------------------------------------------------------------------------

    def get_backend(self) -> str:
        """Return the name under which this handler was asked for."""
        return self._parameters.backend

    @property
    def use_agent_store(self) -> bool:
        """Workers find a store of ours at MASTER_ADDR and MASTER_PORT, and host none."""
        return True

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._parameters.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next cycle: wait for its nodes, and for a place.

        The store in the answer is for agents; workers have that of `bootstrap_store_info`.
        Raises: RendezvousClosedError (also where this node is excluded or told to stop waiting),
        RendezvousTimeoutError, RendezvousConnectionError; ConfigurationError if the ranks are wrong."""
        with _as_torch():
            formation = self._join()
        rank = formation.rank_of(self.id)
        assert rank is not None
        host = formation.seats[0]
        return RendezvousInfo(
            dist.PrefixStore(f"agents/{formation.cycle}", self._store),
            rank,
            len(formation.seats),
            RendezvousStoreInfo(self._meeting.found.get(host.address, host.address), host.port),
        )

    def is_closed(self) -> bool:
        """Return whether there will be no further cycle. Raises: RendezvousConnectionError."""
        with _as_torch():
            return bool(self.last_words())

    def set_closed(self, reason: str = "the job is over") -> None:
        """Say that there will be no further cycle. Raises: RendezvousConnectionError."""
        with _as_torch():
            self.run(self.rendezvous.close(reason))

    def num_nodes_waiting(self) -> int:
        """Return how many nodes would take part if there was a new cycle now: those for which there is a
        place, and those of this cycle that are through with it. None once the rendezvous is closed.

        Raises: RendezvousConnectionError."""
        with _as_torch():
            return self.run(self.rendezvous.waiting())

    def shutdown(self) -> bool:
        """Close the rendezvous for all and leave it; see `leave`."""
        if not self._has_left:
            try:
                self.set_closed()
            except RendezvousConnectionError:
                pass  # whoever hosted it is gone, and that has closed it
        return self.leave()

    # -- what torch does not have -----------------------------------------------------------------

    @property
    def id(self) -> str:
        """The name of this agent, never used again."""
        return self.rendezvous.id

    @property
    def node(self) -> str:
        """The name of this node, the same when it comes back."""
        return self.rendezvous.node

    @property
    def interval(self) -> float:
        """Seconds between two looks at others."""
        return self.rendezvous.terms.interval

    @property
    def cycle(self) -> int:
        """The cycle that this agent takes or took part in; counts from 0 for the job, -1 before the first."""
        return self.rendezvous.cycle

    @property
    def formation(self) -> Formation:
        """Who takes part in the cycle."""
        return self.rendezvous.formation

    def run(self, protocol: Protocol[T], perform: Callable[[Emit | HighestStep], Any] | None = None) -> T:
        """Run a protocol of this agent on the job's store. perform: what is no business of the store.

        Raises: StoreError."""
        return self._driver.run(protocol, perform)

    @property
    def is_host(self) -> bool:
        """Whether the job's store is in this node's store process."""
        return self._meeting.is_host

    @property
    def store_pid(self) -> int:
        """The process beside this one that hosts its stores."""
        return self._stores.pid

    def end_cycle(self, reason: str) -> str:
        """Say that the cycle is over, for all its agents; answers what was said first. Raises: StoreError."""
        return self.run(self.rendezvous.end_cycle(reason))

    def cycle_end(self) -> str | None:
        """Return what `end_cycle` was told first by any agent, None if nothing yet. Raises: StoreError."""
        return self.run(self.rendezvous.cycle_end())

    def is_cycle_ended(self) -> bool:
        """Return whether the workers of this cycle are to be stopped: an agent has ended it, there is a next
        one already, or none any more. Raises: StoreError."""
        return self.cycle_end() is not None or self.run(self.rendezvous.newest()).cycle > self.cycle

    def lost_nodes(self) -> list[str]:
        """Return the nodes of this cycle that left it, or are lost: killed, stopped or cut off.

        An agent looks at one neighbour only, the nearest that is not known to be gone, and tells all.
        Raises: StoreError."""
        return [seat.node for seat in self.formation.seats if seat.id in self.look().lost]

    def look(self, counter: str = "log/count") -> Around:
        """Return what is new around this agent, of which the cycle has a place. counter: a key of the store that
        holds a number, read at the same time. One operation where nothing is. Raises: StoreError."""
        return self.run(self.rendezvous.look(counter))

    @property
    def time_left(self) -> float | None:
        """Seconds until the others may go on without this node, None unless it is cut off from the job's store: no
        answer came for most of the time after which others take it for lost. It takes part no more then."""
        return self._beating.time_left

    @property
    def why_cut_off(self) -> str:
        """Why this agent is cut off from the job's store, empty unless it is."""
        if self.time_left is None:
            return ""
        if self.is_host:
            return f"its process {self.store_pid} here did not answer for {self._beating.lease:g} s (store_timeout)"
        return (
            f"it did not answer for {self._beating.lease:g} s, and the others take a node for lost that is silent for "
            f"{self.rendezvous.terms.lost_after:g} s (--rdzv-conf keep_alive_interval, keep_alive_max_attempt)"
        )

    def others(self, leaving: Collection[str]) -> int:
        """Return how many nodes could take part in the next cycle, without this one and without those of the agents
        that leave. Raises: StoreError."""
        return self.run(self.rendezvous.others(leaving))

    def is_taken_for_lost(self) -> bool:
        """Whether others have found this agent lost, as after it was stopped for a while. Raises: StoreError."""
        return self.run(self.rendezvous.is_taken_for_lost())

    def last_words(self) -> str:
        """Return why the rendezvous is closed, empty if it is not. Raises: StoreError."""
        return self.run(self.rendezvous.newest()).closed

    def exclude(self, node: str, reason: str = "") -> None:
        """Let a node take part in no further cycle. The one that runs is not ended. Raises: StoreError."""
        self.run(self.rendezvous.exclude(node, reason))

    def probe(self) -> None:
        """Ask the job's store something, over a connection of its own; from any thread, one at a time.

        Raises: StoreError."""
        if self._probing is None:
            self._probing = self._connect()
        execute(Add("probe", 0), self._probing)

    def turn_away(self, reason: str) -> None:
        """End a job that cannot begin, with the same reason on all nodes. The agent whose node hosts the job's store
        waits until as many nodes as the job needs have read it, 300 s at most."""
        with contextlib.suppress(RendezvousConnectionError):
            self.set_closed(reason)
        self.leave(reason, self.rendezvous.terms.least - 1)

    def leave(self, reason: str = "", expected: int = 0) -> bool:
        """Take part no more, without closing the rendezvous for others; answers whether all went well.

        The agent whose node hosts the job's store waits until the others have left, or are lost; while the job
        goes on as long as it takes, once it is over 300 s at most. expected: so many others must have left, also if
        they have not come yet."""
        if self._has_left:
            return True
        self._has_left = True
        try:
            self.run(self.rendezvous.leave(reason))
            self._await_leaving(expected)
        except (StoreError, OSError):
            return False
        finally:
            self.watch.close()
            self._beating.stop()
            if self._owns_stores:
                self._stores.close()
        return True

    # -- small parts ------------------------------------------------------------------------------

    def _join(self) -> Formation:
        """Wait until a cycle has a place for this agent. Raises: RendezvousClosedError, RendezvousTimeoutError."""
        if self._seat is None:
            port, address = self._stores.take().port, self._meeting.address
            self._seat = Seat(self.id, self.node, address, port, self._rank, self._workers, self._role)
        found = self.run(self.rendezvous.join(self._seat))
        if isinstance(found, Refusal):
            raise (RendezvousTimeoutError if found.kind == "late" else RendezvousClosedError)(found.why)
        self._prepare_next(self._seat.port if found.seats[0].id == self.id else None)
        return found

    def _prepare_next(self, used: int | None) -> None:
        """Have a store opened for the next cycle if ours is taken now; that of the cycle before ends.

        used: port of ours if it is taken."""
        if self._serving is not None:
            self._stores.release(self._serving)
        self._serving = used
        if used is not None:
            self._stores.ask(self._meeting.address)
            self._seat = None

    def _connect(self) -> Any:
        return dist.PrefixStore(f"resilience/{self._parameters.run_id}", self._meeting.connect())

    def _await_leaving(self, expected: int = 0) -> None:
        """Where the job's store is ours: wait until nobody needs it any more. Where it is etcd, and nobody
        else is left of a job that is over: clear up."""
        forget = self._meeting.forget
        if self.is_host or forget is not None:
            is_last = self.run(self.rendezvous.await_leaving(self.is_host, expected))
            if is_last and forget is not None:
                forget()


@contextlib.contextmanager
def _as_torch() -> Iterator[None]:
    """What torch's callers expect where the store is gone."""
    try:
        yield
    except StoreError as error:
        raise RendezvousConnectionError(str(error)) from error
