"""Who takes part in the next cycle, and with which store?  The rendezvous of agents, behind torch's interface.

Agents meet in the job's store (`meeting`). Whoever wants to take part says so in a log; the first to come
reads it and forms the cycle by writing one key, which nobody can write twice (`core.gathering`). All others
wait for that key. Each agent holds a store ready for the next cycle, and that of group rank 0 is taken: a
cycle never sees keys of another. Agents that stop counting (`beats`) are lost, and so is a leader: the next
takes over. torch's own state machine is not used: it polls once a second, compares wall clocks of hosts,
unpickles what it reads from the network, and forms a smaller cycle only after a last call of 30 s."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from resilience.adapters.environment import node_name
from resilience.adapters.store import counts, execute
from resilience.core import gathering, group_ranks
from resilience.core.gathering import Around, Arrived, Excluded, Formation, Left, Nothing, Seat
from resilience.core.restart import Add, CompareSet, Read, Set
from resilience.errors import ConfigurationError, StoreError
from resilience.launcher import beats
from resilience.launcher.beats import Beating, Silences, Timer
from resilience.launcher.ledger import Ledger
from resilience.launcher.meeting import meet, rank_of, seconds
from resilience.launcher.stores import StoreProcess

NOTICE = 0.25  # seconds between looks at what seldom happens
LONGEST_PAUSE = 0.1  # seconds between two looks at the key that is waited for
ASK_EVERY = 10  # looks at the log, after which it is asked for the next cycle even if nothing was said there
LEAVE_LIMIT = 300.0  # seconds that others may take to leave a job that is over


class Handler(RendezvousHandler):
    """The rendezvous of one agent. Main thread only.

    stores: the agent's store process; made here if none is given, and then ended here. node: this node's name, the
    same when it comes back; rank: its place in the infrastructure's order, None for a deterministic one;
    is_interrupted: asked while waiting, True ends the wait. Of `--rdzv-conf`: inner, is_host, node, join_timeout 600,
    last_call_timeout 30, keep_alive_interval 1, keep_alive_max_attempt 8 (seconds, and how many intervals an agent
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
        self._least, self._most = parameters.min_nodes, parameters.max_nodes
        self._join_limit = seconds(parameters, "join_timeout", 600)
        self._last_call = seconds(parameters, "last_call_timeout", 30)
        self.interval = seconds(parameters, "keep_alive_interval", 1)  # at which others are to be looked at
        self._silences = Silences(self.interval, self.interval * seconds(parameters, "keep_alive_max_attempt", 8))
        self.is_interrupted = is_interrupted
        self.node = node or str(parameters.get("node") or node_name())
        self.id = f"{self.node}/{uuid.uuid4().hex[:12]}"
        self._rank = rank_of(parameters, rank)
        self._workers, self._role = workers, role
        self._owns_stores = stores is None
        self._stores = stores or StoreProcess.start()
        self._meeting = meet(parameters, self._stores, self._join_limit, is_interrupted)
        self._store: Any = self._connect()
        limit = seconds(parameters, "store_timeout", 120) / beats.LEASE if self.is_host else self._silences.limit
        self._beating = Beating(self._connect, self.id, self.interval, limit, self._meeting.cut)
        self._ledger = Ledger(self._store, lambda: self.why_cut_off)  # a client may come back, this agent may not
        self.job_store: Any = dist.PrefixStore("job", self._store)
        self._stores.ask(self._meeting.address)  # for the first cycle, while others are waited for
        self._seat: Seat | None = None
        self._serving: int | None = None  # port of the store of the cycle that runs, if it is ours
        self._formation = Formation()
        self._gathering = gathering.begin(self._formation)
        self._duplicates: dict[str, float] = {}  # id -> since when its rank is somebody else's too
        self._wrong = Timer(self._last_call)  # ranks that cannot be
        self._lease: str | None = None  # key of the leadership that this agent holds
        self._asked_at, self._looks_since_asked = -1, 0  # when it was asked for the newest cycle: entries, looks
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
            return bool(self._ledger.newest(self._formation).closed)

    def set_closed(self, reason: str = "the job is over") -> None:
        """Say that there will be no further cycle. Raises: RendezvousConnectionError."""
        with _as_torch():
            newest = self._ledger.newest(self._formation)
            while not newest.closed:
                end = Formation(cycle=newest.cycle + 1, closed=reason)
                newest = self._ledger.write(end)
                self._ledger.append(Nothing())  # wakes those who look at the log first

    def num_nodes_waiting(self) -> int:
        """Return how many nodes would take part if there was a new cycle now: those for which there is a
        place, and those of this cycle that are through with it. None once the rendezvous is closed.

        Raises: RendezvousConnectionError."""
        with _as_torch():
            if self._ledger.newest(self._formation).closed:
                return 0
            self._read()
            return self._gathering.waiting(self._most)

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
    def cycle(self) -> int:
        """The cycle that this agent takes or took part in; counts from 0 for the job, -1 before the first."""
        return self._formation.cycle

    @property
    def formation(self) -> Formation:
        """Who takes part in the cycle."""
        return self._formation

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
        return str(self._ledger.do(CompareSet(f"end/{self.cycle}", reason)))

    def cycle_end(self) -> str | None:
        """Return what `end_cycle` was told first by any agent, None if nothing yet. Raises: StoreError."""
        (text,) = self._ledger.do(Read((f"end/{self.cycle}",)))
        return None if text is None else str(text)

    def is_cycle_ended(self) -> bool:
        """Return whether the workers of this cycle are to be stopped: an agent has ended it, there is a next
        one already, or none any more. Raises: StoreError."""
        return self.cycle_end() is not None or self._ledger.newest(self._formation).cycle > self.cycle

    def lost_nodes(self) -> list[str]:
        """Return the nodes of this cycle that left it, or are lost: killed, stopped or cut off.

        An agent looks at one neighbour only, the nearest that is not known to be gone, and tells all.
        Raises: StoreError."""
        return [seat.node for seat in self._formation.seats if seat.id in self.look().lost]

    def look(self, counter: str = "log/count") -> Around:
        """Return what is new around this agent, of which the cycle has a place. counter: a key of the store that
        holds a number, read at the same time. One operation where nothing is. Raises: StoreError."""
        neighbour = gathering.neighbour(self._gathering, self._formation, self.id)
        watched = [] if neighbour is None else [beats.key(neighbour.id)]
        count, asked, *beat = counts(self._store, ["log/count", counter, *watched])
        self._gathering = self._ledger.read(self._gathering, count)
        if neighbour is not None and self._silences.hear(neighbour.id, beat[0]) >= self._silences.limit:
            self._tell([neighbour.id])
            self._read()
        known = self._gathering
        self._looks_since_asked += 1
        if known.entries != self._asked_at or known.arrived or known.gone or self._looks_since_asked >= ASK_EVERY:
            self._asked_at, self._looks_since_asked = known.entries, 0
            is_over = self._ledger.newest(self._formation).cycle > self.cycle
        else:
            is_over = False  # whoever forms a cycle, or closes the rendezvous, has been seen in the log
        lost = frozenset(seat.id for seat in self._formation.seats if known.is_gone(seat))
        return Around(0 if is_over else known.waiting(self._most), lost, is_over, asked)

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
            f"{self._silences.limit:g} s (--rdzv-conf keep_alive_interval, keep_alive_max_attempt)"
        )

    def others(self, leaving: Collection[str]) -> int:
        """Return how many nodes could take part in the next cycle, without this one and without those of the agents
        that leave. Raises: StoreError."""
        self._read()
        return min(self._most, len(gathering.present(self._gathering, self._formation) - {self.id, *leaving}))

    def is_taken_for_lost(self) -> bool:
        """Whether others have found this agent lost, as after it was stopped for a while. Raises: StoreError."""
        self._read()
        return self.id in self._gathering.gone

    def last_words(self) -> str:
        """Return why the rendezvous is closed, empty if it is not. Raises: StoreError."""
        return self._ledger.newest(self._formation).closed

    def exclude(self, node: str, reason: str = "") -> None:
        """Let a node take part in no further cycle. The one that runs is not ended. Raises: StoreError."""
        self._ledger.do(Set(f"excluded/{node}", reason or "excluded"))
        self._ledger.append(Excluded(node, reason))

    def probe(self) -> None:
        """Ask the job's store something, over a connection of its own; from any thread, one at a time.

        Raises: StoreError."""
        if self._probing is None:
            self._probing = self._connect()
        execute(Add("probe", 0), self._probing)

    def leave(self, reason: str = "") -> bool:
        """Take part no more, without closing the rendezvous for others; answers whether all went well.

        The agent whose node hosts the job's store waits until the others have left, or are lost; while the job
        goes on as long as it takes, once it is over 300 s at most."""
        if self._has_left:
            return True
        self._has_left = True
        try:
            self._ledger.append(Left(self.id, reason))
            self._await_leaving()
        except (StoreError, OSError):
            return False
        finally:
            self._beating.stop()
            if self._owns_stores:
                self._stores.close()
        return True

    # -- joining ----------------------------------------------------------------------------------

    def _join(self) -> Formation:
        """Arrive, and wait until a cycle has a place for this agent."""
        self._hear_refusal()
        last = self._ledger.newest(self._formation)
        _raise_if_closed(last)
        deadline = time.monotonic() + self._join_limit
        if self._seat is None:
            port = self._stores.take().port
            self._seat = Seat(self.id, self.node, self._meeting.address, port, self._rank, self._workers, self._role)
        self._ledger.append(Arrived(self._seat))
        if self._gathering.last.cycle != last.cycle:
            self._gathering = gathering.begin(last)
        while True:
            formation = self._await_formation(deadline)
            _raise_if_closed(formation)
            self._gathering = gathering.begin(formation)
            if formation.rank_of(self.id) is not None:
                self._formation = formation
                self._prepare_next(is_used=formation.seats[0].id == self.id)
                return formation

    def _prepare_next(self, is_used: bool) -> None:
        """Have a store opened for the next cycle if ours is taken now; that of the cycle before ends."""
        assert self._seat is not None
        if self._serving is not None:
            self._stores.release(self._serving)
        self._serving = self._seat.port if is_used else None
        if is_used:
            self._stores.ask(self._meeting.address)
            self._seat = None

    def _await_formation(self, deadline: float) -> Formation:
        """Wait for the next cycle's formation; lead if nobody else does. Raises: RendezvousTimeoutError,
        RendezvousClosedError."""
        number = self._gathering.last.cycle + 1
        epoch, leader = 0, self._take_lead(number, 0)
        last_call = Timer(self._last_call)
        for is_time in self._looks(deadline):
            formation = self._ledger.formation(number)
            if formation is None and leader == self.id:
                formation = self._lead(last_call, is_time)
            if formation is not None:
                self._lease = None
                return formation
            if is_time:
                self._hear_refusal()
                if leader != self.id and self._is_leader_gone(number, epoch, leader):
                    epoch, former = epoch + 1, leader
                    leader = self._take_lead(number, epoch)
                    if leader == self.id:
                        self._tell_lost([former])  # before it is given a place
        raise self._stop_waiting(number)

    def _looks(self, deadline: float) -> Iterator[bool]:
        """Yield for each look at the store, rarer with time, until the deadline or an interrupt; True when it
        is time to look at what seldom happens as well."""
        began = now = noticed = time.monotonic()
        while now < deadline and not self.is_interrupted():
            is_time = now - noticed >= NOTICE
            noticed = now if is_time else noticed
            yield is_time
            time.sleep(min(LONGEST_PAUSE, max(0.001, (now - began) / 10)))
            now = time.monotonic()

    def _stop_waiting(self, number: int) -> RendezvousError:
        known = self._gathering
        is_late = not self.is_interrupted()
        why = f"found no place within {self._join_limit:g} s (join_timeout)" if is_late else "was told to stop"
        self._ledger.append(Left(self.id, why))
        self._give_up_lead()
        if not is_late:
            return RendezvousClosedError(f"node {self.node} was told to stop while it waited for cycle {number}")
        return RendezvousTimeoutError(
            f"node {self.node} {why} in cycle {number}: {len(known.last.seats)} nodes took part in the last one, "
            f"{len(known.arrived)} wait, {len(known.missing)} of the last are missing, {self._least} to {self._most} "
            "are wanted"
        )

    def _hear_refusal(self) -> None:
        """Raise if this node is not wanted."""
        refused, excluded = self._ledger.do(Read((f"refused/{self.id}", f"excluded/{self.node}")))
        if refused is not None:
            raise ConfigurationError(refused)
        if excluded is not None:
            raise RendezvousClosedError(f"node {self.node} is excluded: {excluded}")

    # -- leading ----------------------------------------------------------------------------------

    def _take_lead(self, number: int, epoch: int) -> str:
        """Lead unless somebody else does; answers who does."""
        key = f"leader/{number}/{epoch}"
        leader = str(self._ledger.do(CompareSet(key, self.id)))
        self._lease = key if leader == self.id else None
        return leader

    def _give_up_lead(self) -> None:
        if self._lease is not None:
            self._ledger.do(Set(f"{self._lease}/given_up", "1"))
            self._lease = None

    def _is_leader_gone(self, number: int, epoch: int, leader: str) -> bool:
        (given_up,) = self._ledger.do(Read((f"leader/{number}/{epoch}/given_up",)))
        return given_up is not None or bool(self._silences.lost(self._store, [leader]))

    def _lead(self, last_call: Timer, is_time: bool) -> Formation | None:
        """Look who is there; form the cycle if that can be done now."""
        self._read()
        known = self._gathering
        if is_time and self._tell_lost([*(seat.id for seat in known.missing), *known.arrived]):
            return None  # looks again
        if self._has_duplicates():
            return None
        is_last = last_call.has_run_out(is_running=len(known.arrived) >= self._least)
        if not gathering.is_due(known, self._least, self._most, is_last):
            return None
        try:
            formation = gathering.form(known, self._most, group_ranks.assign)
            self._wrong.has_run_out(is_running=False)
        except ConfigurationError as error:
            if not self._wrong.has_run_out(is_running=True):
                return None  # the node whose rank is missing may only be late
            formation = Formation(cycle=known.last.cycle + 1, closed="the ranks of nodes are wrong", error=str(error))
        return self._ledger.write(formation)

    def _tell_lost(self, ids: Iterable[str]) -> bool:
        """Write down who of these agents is lost; answers whether anybody is."""
        lost = self._silences.lost(self._store, [id for id in ids if id != self.id])
        self._tell(lost)
        return bool(lost)

    def _tell(self, lost: Iterable[str]) -> None:
        for id in lost:
            self._ledger.append(Left(id, f"gave no sign of life for {self._silences.limit:g} s"))

    def _has_duplicates(self) -> bool:
        """Answer whether two agents claim one rank. The later one is refused, unless the other turns out to
        be lost: then it is its successor."""
        claims: dict[int, Seat] = {}
        now = time.monotonic()
        is_any = False
        for seat in self._gathering.candidates:
            if seat.infra is None or claims.setdefault(seat.infra, seat) is seat:
                continue
            is_any = True
            if now - self._duplicates.setdefault(seat.id, now) > self._silences.limit + 2 * self.interval:
                self._ledger.do(
                    Set(
                        f"refused/{seat.id}",
                        f"node {seat.node} has rank {seat.infra} of the infrastructure, and so has node "
                        f"{claims[seat.infra].node}, which came first; each node needs a rank of its own",
                    )
                )
                self._ledger.append(Left(seat.id, "its rank is taken"))
        return is_any

    # -- small parts ------------------------------------------------------------------------------

    def _read(self) -> None:
        self._gathering = self._ledger.read(self._gathering)

    def _connect(self) -> Any:
        return dist.PrefixStore(f"resilience/{self._parameters.run_id}", self._meeting.connect())

    def _await_leaving(self) -> None:
        """Where the job's store is ours: wait until nobody needs it any more. Where it is etcd, and nobody
        else is left of a job that is over: clear up."""
        if not self.is_host and self._meeting.forget is None:
            return
        known = self._gathering
        known = msgspec.structs.replace(
            known, arrived={seat.id: seat for seat in known.last.seats if not known.is_gone(seat)} | dict(known.arrived)
        )
        closed_at: float | None = None
        while True:
            known = self._ledger.read(known)
            if closed_at is None and self._ledger.newest(self._formation).closed:
                closed_at = time.monotonic()
            if not known.arrived:
                if self._meeting.forget is not None and closed_at is not None:
                    self._meeting.forget()
                return
            is_late = closed_at is not None and time.monotonic() - closed_at > LEAVE_LIMIT
            if not self.is_host or is_late or self.is_interrupted():
                return
            self._tell_lost(known.arrived)
            time.sleep(LONGEST_PAUSE)


@contextmanager
def _as_torch() -> Iterator[None]:
    """What torch's callers expect where the store is gone."""
    try:
        yield
    except StoreError as error:
        raise RendezvousConnectionError(str(error)) from error


def _raise_if_closed(formation: Formation) -> None:
    if formation.error:
        raise ConfigurationError(formation.error)
    if formation.closed:
        raise RendezvousClosedError(formation.closed)
