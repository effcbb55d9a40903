"""What does a rank's monitor do in the shared store?  It hosts it, reports interruptions, and stands in for ranks.

One worker thread owns the monitor's store clients and performs the loop's requests in order. The loop itself never
waits for the store, except at its end: `finish` waits for the stand-in, at most barrier_timeout, and for the clients
of the stores hosted here."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from resilience.attribution.symptoms import symptom
from resilience.core import restart, watch
from resilience.core.restart import (
    Add,
    Assign,
    Check,
    CompareSet,
    Keys,
    Read,
    Set,
    Unassigned,
    arrive,
    report,
    seat_key,
    stand_in,
    terminated_of,
    unwitnessed,
    witness,
)
from resilience.core.watched import suspicion_in_words
from resilience.errors import LeftInChild, ResilienceError, StoreError, error_in_words
from resilience.facts import encoding, events
from resilience.facts.identity import Origin
from resilience.facts.interruptions import Interruption, InterruptionRecord, encode
from resilience.facts.seats import Seat
from resilience.inprocess._runtime import telling
from resilience.inprocess._runtime.assigning import Hooks, seat_within
from resilience.inprocess._runtime.joining import connect, join, serving_key
from resilience.inprocess._runtime.operations import failure_of, not_hosted, note_arrival
from resilience.inprocess._runtime.store_silences import StoreSilences
from resilience.inprocess._runtime.supervision import Supervisor, agree_on_folder, finished_key
from resilience.inprocess.hook_store import CallStore
from resilience.inprocess.store import Notice, hosting
from resilience.monitor import messages
from resilience.system import open_sockets, patience
from resilience.system.client_sockets import is_refused, short_lookups
from resilience.system.listening_sockets import are_next_free, listen_beside_free_ports, local_address
from resilience.system.patience import Patience
from resilience.system.store import StoreLike, drive, execute
from resilience.telemetry import standard
from resilience.telemetry.restart_lines import RestartLine

LOOKS = 100  # consecutive checks, LOOK_EVERY seconds apart, that must find no client, unless all are known to have left
LOOK_EVERY = 0.02
JOIN_LIMIT = 300.0  # seconds for this call's store to replace an earlier one on the same port
FIRST_LIMIT = 15.0  # seconds in which the first connection is tried again; the rank waits for it
CONNECT_PAUSE = 0.5  # seconds between two attempts to connect to the store
CONNECT_LIMIT = 5.0  # seconds for a monitor to find the store if its rank is already gone
MONITORS_LIMIT = 2.0  # seconds that the host waits for the other monitors once all ranks have left
LEFT_KEY = "left"  # counts the monitors whose ranks' ends are on record
ASSIGNING = ("rank_assignment", "rank_filter")  # stages in which a rank computes its next seat
T = TypeVar("T")
KEPT_SERVERS = 2  # the present iteration's and the previous one's: old clients must be able to leave


class MonitorStore:
    """The store side of the in-process monitor. All store work happens in its one thread."""

    def __init__(
        self,
        store_factory: Callable[..., Any],
        store_kwargs: dict[str, Any],
        hooks: Hooks,
        is_host: bool,
        notice: Notice,
        ready: Callable[[str], None],
        emit: Callable[..., None],
        alert: Callable[[str], object],
        terminal: str = "",
        has_completed: Callable[[], bool] = lambda: False,
    ) -> None:
        """alert: prints a line on the rank's terminal while the rank lives. terminal: its path, if stderr is one.
        has_completed: returns True once the rank has completed its call."""
        self._factory = store_factory
        self._kwargs = store_kwargs
        self._hooks = hooks
        self._is_host = is_host
        self._notice = notice
        self._ready = ready
        self._emit = emit
        self._alert = alert
        self._terminal = terminal
        self._has_completed = has_completed
        self._base_store: Any = None
        self._hosting_s = 0.0  # time to connect to the base store, or to host it
        self._patience: Patience | None = None
        self._store: StoreLike
        self._call_begin: messages.Begin
        self._folder = Path()
        self._line: RestartLine | None = None  # for the last restart
        self._started_iteration: int | None = None
        self._is_begun = self._is_representing = self._are_others_seen = False
        # Initial rank and iteration after which the rank hung in assignment or filter.
        self._hung_assignment_of: tuple[int, int | None] | None = None
        self._witnessed_iteration: int | None = None  # the last iteration in which the other ranks were waited for
        self._last_iteration = 0  # of the job, as far as this monitor has followed it
        self._all_left_since: float | None = None  # when this monitor first saw that key
        self._waits = restart.WaitLimits()
        self._ranks_store: tuple[str, int] | None = None  # the server of the rank's own connection
        self._servers: list[Any] = []
        self._spare: Any = None
        self._final_event: events.Event | None = None
        self._represented: Seat | None = None  # the seat of a rank whose process lived when the others went on
        self._job_goes_on = False  # without this rank; other ranks still need the store hosted here
        self._supervisor: Supervisor | None = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.silences = StoreSilences(self._tasks.put, lambda: execute(Add(LEFT_KEY, 0), self._store))
        self._thread = threading.Thread(target=self._work, name="resilience-store", daemon=True)

    def start(self) -> None:
        """Connect in the background, and host the store if that is this monitor's task."""
        self._thread.start()

    # -- the loop's requests --------------------------------------------------------------------

    def begin(self, begin: messages.Begin) -> None:
        self._is_begun = True
        self._waits = begin.waits
        self._ranks_store = begin.store
        self._folder = Path(os.fsdecode(begin.folder))
        self._tasks.put(lambda: self._begin(begin))

    def suspect(self, rank: int, suspicion: events.HangSuspected) -> None:
        self._alert(suspicion_in_words(rank, suspicion))

    def seek_others(self) -> None:
        """Do nothing: monitors of a Wrapper have no channels to each other."""

    def started(self, origin: Origin) -> None:
        if origin.iteration == self._started_iteration:
            return
        self._started_iteration = origin.iteration
        self._line = telling.of_restart(self._folder, origin, self._alert, self._emit, self._line) or self._line

    def hung_up(self) -> None:
        if self._line is not None:
            self._line.finish()
            self._line = None

    def interrupt(self, record: InterruptionRecord) -> None:
        self._are_others_seen = False
        if record.interruption is Interruption.HARD_TIMEOUT and record.stage in ASSIGNING:
            self._hung_assignment_of = record.rank, record.iteration
        self._tasks.put(lambda: self._interrupt(record))

    @property
    def are_others_seen(self) -> bool:
        return self._are_others_seen

    def host(self, iteration: int) -> None:
        self._tasks.put(lambda: self._host(iteration))

    def stand_in(self, record: InterruptionRecord) -> None:
        if self._is_begun:
            self._is_representing = True
            self._tasks.put(lambda: self._stand_in(record))

    def finish(self) -> events.Event | None:
        """Finish all requests, then return once no process needs the stores hosted here.

        If the rank has not begun its call, there are no requests, and this monitor may never have found the store."""
        if self._notice.refusal is not None:
            self._notice.refusal.await_read()
        if not self._is_begun:
            return None
        # The other ranks wait for a dead rank until barrier_timeout. A rank that has left has nothing open there.
        deadline = time.monotonic() + (self._waits.barrier if self._is_representing else CONNECT_LIMIT)
        while self._base_store is None and self._thread.is_alive():
            if time.monotonic() >= deadline or is_refused(self._ranks_store):
                return None  # this monitor has not found the store, or no process hosts it any more
            self._thread.join(CONNECT_PAUSE)
        self._tasks.put(self._finish)
        self._tasks.put(None)
        while self._thread.is_alive():
            self._thread.join(LOOK_EVERY)
            if self._patience is not None:
                self._patience.check()  # this process must end even if the store never answers
        self._await_last_client()
        return self._final_event

    # -- the worker -----------------------------------------------------------------------------

    def _work(self) -> None:
        began = time.monotonic()
        try:
            if self._is_host:
                with hosting(True, self._notice):
                    self._base_store, opened = patience.connect(lambda: self._factory(**self._kwargs))
                execute(Set(serving_key(self._notice), "1"), self._base_store)
            else:
                join_store = partial(join, self._factory, self._kwargs, self._notice, JOIN_LIMIT)
                self._base_store, opened = _repeated(join_store, FIRST_LIMIT)
            self._patience = Patience(self._base_store, opened, self._waits.barrier, LOOK_EVERY)
            self._hosting_s = time.monotonic() - began
            self._ready("")
        except Exception as error:  # a user's factory may raise anything; the rank gets the reason
            self._ready(str(error) if isinstance(error, StoreError) else error_in_words(error))
            self._tasks.get()  # once the call has begun, events can be recorded
            self._emit(events.HookFailed("monitor", f"it could not connect to the store: {error_in_words(error)}"))
            return
        with patience.bounded(self._patience):
            self._perform_tasks()

    def _perform_tasks(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except LeftInChild:  # a hook has forked: the child is no monitor
                os._exit(0)
            except Exception as error:  # the edge of a thread that later stands in for the rank
                self._emit_unless_over(failure_of("monitor", error))

    def _emit_unless_over(self, event: events.Event) -> None:
        """Emit an event of this monitor's work. Once the rank has completed its call, a lost store harms nobody: its
        host may leave while the last hooks of other ranks still run."""
        if not (isinstance(event, events.StoreLost) and self._has_completed()):
            self._emit(event)

    def _begin(self, begin: messages.Begin) -> None:
        self._call_begin = begin
        if getattr(self._base_store, "is_hosted_here", False):
            self._emit(events.StoreHosted("wrapper", self._base_store.host, self._base_store.port, self._hosting_s))
        if self._patience is not None:
            self._patience.limit = begin.waits.barrier
        self._store = dist.PrefixStore(begin.prefix, self._base_store)
        self.silences.open(begin.waits.barrier)
        try:
            self._supervise(begin)
        except Exception as error:
            self._does_not_supervise(error)
            raise

    def _supervise(self, begin: messages.Begin) -> None:
        folder = agree_on_folder(self._store, begin.origin.node)
        # Half the limit: another monitor of the node can still lead before the other nodes count this one as silent.
        connect_as_leader = partial(self._connect, begin.heartbeat_timeout / 2)
        self._supervisor = Supervisor(
            begin, folder, connect_as_leader, self._represent, self._emit_unless_over, self._does_not_supervise
        )
        self._supervisor.start()

    def _does_not_supervise(self, error: Exception) -> None:
        """Let the rank, which counted this monitor as ready, show by itself that it lives: the node may have no other
        monitor."""
        self._ready(error_in_words(error))

    def _connect(self, limit: float, failed: Callable[[Exception], None] = lambda error: None) -> Any:
        """Return a further connection to the store. `_repeated` has the arguments. Raises: what the factory raises."""
        further = partial(connect, self._factory, self._kwargs, self._notice)
        return _repeated(partial(patience.connect, further), limit, failed)[0]

    def _represent(self, record: InterruptionRecord) -> None:
        """Stand in for a rank whose own monitor is gone. Runs in its own thread, and returns once the stand-in has
        ended. The other ranks wait for it until barrier_timeout, so it tries to connect for as long."""
        began = time.monotonic()
        first_error: Exception | None = None

        def failed(error: Exception) -> None:
            nonlocal first_error
            if first_error is None:
                first_error = error
                self._emit(_failed_stand_in(record, began, error))

        try:
            connection = self._connect(self._call_begin.waits.barrier, failed)
            store = dist.PrefixStore(self._call_begin.prefix, connection)
            ended, _ = self._drive_stand_in(record, store)
            if ended.result != "failed":  # else a node that watches this rank later would stand in for it again
                execute(Set(finished_key(record.rank), "1"), store)
        except Exception as error:  # the edge of the thread
            ended = _failed_stand_in(record, began, error)
        self._emit(ended)

    def _interrupt(self, record: InterruptionRecord) -> None:
        assert record.iteration is not None
        keys = Keys(record.iteration)
        seat = self._last_seat(record.rank, self._store)
        if seat.iteration == record.iteration:  # its stacks are on record, and it may be unable to confirm that itself
            drive(arrive(keys.witnessed, seat.rank, seat.world_size), self._store)
        protocol = report(keys, encode(record), record.rank if symptom(record).is_own else None)
        drive(protocol, self._store, lambda operation: note_arrival(operation, self._store, record, self._emit))
        if record.iteration != self._witnessed_iteration:
            self._witnessed_iteration = record.iteration
            self._await_witnesses(keys, seat)
        self._are_others_seen = True

    def _await_witnesses(self, keys: Keys, seat: Seat) -> None:
        """Emit which of the other ranks have recorded their stacks before anything was cut."""
        began = time.monotonic()
        missing: list[int] = []
        if not drive(witness(keys, seat.rank, seat.world_size, watch.EVIDENCE), self._store):
            absent = drive(unwitnessed(keys, seat.world_size), self._store)
            missing = [
                initial for initial in range(self._world_size) if self._has_seat(initial, keys.iteration, absent)
            ]
        self._emit(events.OthersSeen(seat.initial_rank, tuple(missing), duration_s=time.monotonic() - began))

    def _has_seat(self, initial_rank: int, iteration: int, ranks: Collection[int]) -> bool:
        """Return True if a rank has one of these seats in an iteration."""
        if not ranks:
            return False
        seat = self._last_seat(initial_rank, self._store)
        return seat.iteration == iteration and seat.rank in ranks

    def _host(self, iteration: int) -> None:
        """Publish a store for the process groups of one iteration; create the next one ahead of time."""
        began = time.monotonic()
        spare, self._spare = self._spare, None
        try:
            server = publish_server(iteration, self._call_begin.base_host, self._store, spare)
        except (OSError, RuntimeError) as error:  # rank 0 hosts a store itself; a stand-in goes on
            self._emit(not_hosted(iteration, error))
            return
        if server is None:
            return
        self._emit(events.StoreHosted("iteration", server.host, server.port, time.monotonic() - began))
        self._servers.append(server)
        del self._servers[:-KEPT_SERVERS]
        with suppress(OSError, RuntimeError):  # then the next one is created when it is needed
            self._spare = iteration_server(server.host)

    def _stand_in(self, record: InterruptionRecord) -> None:
        seat = self._represented
        if seat is None:
            result, seat = self._drive_stand_in(record, self._store)
            if record.exit is None and result.result != "failed":  # a container takes this monitor with the process
                self._emit(result)
                self._represented = seat
            else:
                self._final_event = result
        self._job_goes_on = True
        if record.exit is not None and self._terminal and telling.ends_with_ranks() and self._was_last_rank_0(seat):
            standard.end_of_killed(self._terminal, self._folder, record.exit)

    def _was_last_rank_0(self, seat: Seat | None) -> bool:
        """Return True if the rank that died in this seat was rank 0 and no rank continues. No rank continues if the
        store is lost."""
        if seat is None or seat.rank != 0:
            return False
        try:
            terminated = drive(terminated_of(seat, 0.0), self._store)
        except (ResilienceError, RuntimeError, OSError):
            return True
        return terminated is None or len(terminated) == seat.world_size

    def _drive_stand_in(
        self, record: InterruptionRecord, store: StoreLike
    ) -> tuple[events.RankStoodInFor, Seat | None]:
        """Represent a rank. Return the result, and the rank's last seat."""
        began = time.monotonic()
        seat: Seat | None = None

        def perform(operation: restart.Operation) -> Any:
            nonlocal seat
            if not isinstance(operation, Assign):
                return note_arrival(operation, store, record, self._emit)
            following = self._assign(operation)
            seat = following if isinstance(following, Seat) else None
            return following

        try:
            seat = self._last_seat(record.rank, store)
            result: Any = drive(stand_in(seat, self._call_begin.waits, encode(record)), store, perform, chunk=3600.0)
        except (ResilienceError, RuntimeError, OSError) as error:
            return _failed_stand_in(record, began, error), seat
        return events.RankStoodInFor(record.rank, result, time.monotonic() - began), seat

    def _last_seat(self, initial_rank: int, store: StoreLike) -> Seat:
        """Return the seat that the rank published last, or its seat at the start of the call."""
        (text,) = execute(Read((seat_key(initial_rank),)), store)
        if text is not None:
            return encoding.from_json(text, Seat)
        size = self._world_size
        return Seat(initial_rank, initial_rank, size, size, restart.ENTRY)

    @property
    def _world_size(self) -> int:
        """Return how many ranks began the call."""
        size = self._call_begin.origin.world_size
        assert size is not None
        return size

    def _assign(self, operation: Assign) -> Seat | Unassigned | None:
        seat = operation.seat
        following: Seat | Unassigned | None = operation.place
        if following is None and (seat.initial_rank, seat.iteration) == self._hung_assignment_of:
            return Unassigned(self._world_size)  # the hook would hang here as it did in the rank
        if following is None:
            limit = self._assign_limit
            try:
                connection = self._connect(limit)
            except Exception as error:  # a store_factory may raise anything; the rank gets the place that is left
                self._emit(events.HookFailed("rank_assignment", error_in_words(error)))
                return Unassigned(self._world_size)
            store = CallStore(self._call_begin.prefix, connection, self._emit)
            following = seat_within(limit, self._hooks, operation, store, self._world_size)
        if isinstance(following, Seat) and following.rank == 0:
            self._host(following.iteration)
        return following

    @property
    def _assign_limit(self) -> float:
        """Return how many seconds the hooks have to find the seat of a rank that is gone. The other ranks wait for it
        until barrier_timeout, and the rank itself may have been in a hook for hard_timeout."""
        hook = self._call_begin.limits.hook.hard
        assert hook is not None
        return (self._waits.barrier - hook) / 2

    # -- leaving --------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Tell the neighbours and the store's host that this rank's end is on record and its connections are closed."""
        if self._supervisor is not None:
            self._supervisor.stop()
        rank = self._call_begin.origin.initial_rank
        assert rank is not None
        execute(Set(finished_key(rank), "1"), self._store)
        self._last_iteration = self._last_seat(rank, self._store).iteration
        outcome = Keys(self._last_iteration).outcome
        self._job_goes_on |= execute(Read((outcome,)), self._store) != (restart.COMPLETED,)
        execute(Add(LEFT_KEY, 1), self._store)  # the last operation of this rank and its monitor

    def _have_all_left(self) -> bool:
        """Return True if each rank and its monitor have done their last operation, or all ranks have and the monitors
        had time to. Later connections belong to the next call, whose ranks wait for this one to leave."""
        try:
            if execute(Add(LEFT_KEY, 0), self._store) >= self._world_size:
                return True
            if self._all_left_since is None and self._have_ranks_left():
                self._all_left_since = time.monotonic()
            return self._all_left_since is not None and time.monotonic() - self._all_left_since >= MONITORS_LIMIT
        except ResilienceError:
            return True

    def _have_ranks_left(self) -> bool:
        """Return True if all ranks have left the job's last iteration. The job may go on without this rank, and ranks
        without a monitor are counted nowhere else."""
        keys = Keys(self._last_iteration)
        if execute(Check((f"{keys.exit}/done",)), self._store):
            return True
        (outcome,) = execute(Read((keys.outcome,)), self._store)
        if outcome not in (None, restart.COMPLETED):
            self._last_iteration += 1
        return False

    def _await_last_client(self) -> None:
        """Wait until all have left or no other process is connected. After a completed call the wait ends at the latest
        when the barrier's limit has passed. If the job continues without this monitor's rank, dead or left, there is no
        limit."""
        ports = {server.port for server in self._servers}
        if self._is_host and isinstance(self._base_store, dist.TCPStore):
            ports.add(self._base_store.port)
        deadline = float("inf") if self._job_goes_on else time.monotonic() + self._waits.barrier
        looks = 0
        while ports and looks < LOOKS and time.monotonic() < deadline and not self._have_all_left():
            looks = 0 if open_sockets.has_foreign_clients(ports) else looks + 1
            time.sleep(LOOK_EVERY)


def _repeated(
    connect_once: Callable[[], T], limit: float, failed: Callable[[Exception], None] = lambda error: None
) -> T:
    """Connect to the store. Tries again for `limit` seconds: the host of the store may be overloaded for a while, or
    this process short of descriptors.

    failed: called with the error before each new attempt. Raises: what the factory raises."""
    deadline = time.monotonic() + limit
    while True:
        try:
            return connect_once()
        except Exception as error:  # a user's factory may raise anything
            if time.monotonic() >= deadline:
                raise
            failed(error)
        time.sleep(CONNECT_PAUSE)


def _failed_stand_in(record: InterruptionRecord, began: float, error: Exception) -> events.RankStoodInFor:
    """began: the start of the stand-in, in monotonic seconds."""
    reason = error_in_words(error)
    return events.RankStoodInFor(record.rank, "failed", time.monotonic() - began, reason)


def iteration_server(address: str) -> dist.TCPStore:
    """Return a fresh server for the process groups of one iteration, on a port of its own."""
    listener = listen_beside_free_ports(address)
    port = listener.getsockname()[1]
    with short_lookups():
        return dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def publish_server(iteration: int, base_host: str, store: StoreLike, server: Any = None) -> Any:
    """Publish `server`, or a fresh one, as the store for the process groups of one iteration. Return it, or None if
    another one is published already, or the iteration was interrupted. Raises: OSError, RuntimeError, StoreError."""
    # A server created ahead of time is of no use once its next ports are taken.
    if server is None or not are_next_free(server.host, server.port):
        try:
            server = iteration_server(local_address(base_host))
        except (OSError, RuntimeError):  # another process took the port, or descriptors were short for a moment
            server = iteration_server(local_address(base_host))
    address = f"{server.host}:{server.port}"
    published = execute(CompareSet(Keys(iteration).server, address), store)
    return server if published == address else None
