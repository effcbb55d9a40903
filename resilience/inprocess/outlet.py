"""What a rank's monitor does in the shared store: host, report, stand in.

One worker thread owns the monitor's store clients and does what the loop asks, in order. The loop
never waits for the store; only at its very end `finish` waits for the stand-in, which is bounded by
barrier_timeout, and for the clients of the stores hosted here."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from resilience.adapters import connections, patience
from resilience.adapters.connecting import short_lookups
from resilience.adapters.patience import Patience
from resilience.adapters.serving import are_next_free, listen_beside_free_ports, local_address
from resilience.adapters.store import StoreLike, drive, execute
from resilience.attribution.symptoms import symptom
from resilience.core import encoding, events, restart, watch
from resilience.core.attribution import InterruptionRecord, encode
from resilience.core.identity import Origin
from resilience.core.restart import (
    Add,
    Assign,
    Check,
    Keys,
    Read,
    Seat,
    Set,
    arrive,
    report,
    seat_key,
    stand_in,
    terminated_of,
    unwitnessed,
    witness,
)
from resilience.core.watched import suspicion_in_words
from resilience.errors import ResilienceError, StoreError
from resilience.inprocess import telling
from resilience.inprocess.assigning import Hooks, seat_after
from resilience.inprocess.joining import connect, join, serving_key
from resilience.inprocess.operations import note_arrival
from resilience.inprocess.store import Notice, hosting
from resilience.inprocess.supervision import Supervisor, agree_on_folder, finished_key
from resilience.monitor import messages
from resilience.telemetry import standard
from resilience.telemetry.restart_lines import Line

LOOKS = 100  # consecutive looks, LOOK_EVERY seconds apart, that must find no client if not all are known to have left
LOOK_EVERY = 0.02
JOIN_LIMIT = 300.0  # seconds for the store of this call to replace that of an earlier one on the same port
CONNECT_LIMIT = 5.0  # seconds in which a monitor whose rank is gone already may still find the store
MONITORS_LIMIT = 2.0  # seconds that the host gives the other monitors once all ranks are out
LEFT_KEY = "left"  # counts the monitors whose ranks are accounted for
KEPT_SERVERS = 2  # the present iteration's and the one before: old clients must be able to leave


class StoreOutlet:
    """The outlet of the in-process monitor. All store work happens in its one thread."""

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
    ) -> None:
        """alert: shows a line at the rank's terminal, while the rank lives; terminal: its path, if stderr is one."""
        self._factory = store_factory
        self._kwargs = store_kwargs
        self._hooks = hooks
        self._is_host = is_host
        self._notice = notice
        self._ready = ready
        self._emit = emit
        self._alert = alert
        self._terminal = terminal
        self._base: Any = None
        self._hosting_s = 0.0  # that connecting to the base took, or hosting it
        self._patience: Patience | None = None
        self._store: StoreLike
        self._begun: messages.Begin
        self._is_begun = False
        self._folder = Path()
        self._line: Line | None = None  # about the last restart
        self._is_representing = False
        self._are_others_seen = False
        self._witnessed_in: int | None = None  # the last iteration in which the other ranks were waited for
        self._exit_key = ""  # there once all ranks are out of the last iteration
        self._out_since: float | None = None  # when that was seen
        self._waits = restart.Limits()
        self._servers: list[Any] = []
        self._spare: Any = None
        self._result: events.Event | None = None
        self._job_goes_on = False  # without this rank: the store that is hosted here is still needed
        self._supervisor: Supervisor | None = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="resilience-store", daemon=True)

    def start(self) -> None:
        """Connect (and host, where that is this monitor's task) in the background."""
        self._thread.start()

    # -- the loop's requests --------------------------------------------------------------------

    def begin(self, begin: messages.Begin) -> None:
        self._is_begun = True
        self._folder = Path(os.fsdecode(begin.folder))
        self._tasks.put(lambda: self._begin(begin))

    def suspect(self, rank: int, suspicion: events.HangSuspected) -> None:
        self._alert(suspicion_in_words(rank, suspicion))

    def started(self, origin: Origin) -> None:
        self._line = telling.of_restart(self._folder, origin, self._alert, self._emit) or self._line

    def hung_up(self) -> None:
        if self._line is not None:
            self._line.finish()
            self._line = None

    def interrupt(self, record: InterruptionRecord) -> None:
        self._are_others_seen = False
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
        """Let what was asked for be done, then leave when nobody needs this host any more.

        A rank that has not begun its call has asked for nothing, and may never have found the store."""
        if self._notice.refusal is not None:
            self._notice.refusal.await_read()
        if not self._is_begun:
            return None
        deadline = time.monotonic() + CONNECT_LIMIT
        while self._base is None and self._thread.is_alive() and not self._is_representing:
            if time.monotonic() >= deadline:
                return None  # the rank left before this monitor found the store, and nothing is open there
            self._thread.join(LOOK_EVERY)
        self._tasks.put(self._finish)
        self._tasks.put(None)
        while self._thread.is_alive():
            self._thread.join(LOOK_EVERY)
            if self._patience is not None:
                self._patience.check()  # this process must end, also when the store never answers
        self._await_last_client()
        return self._result

    # -- the worker -----------------------------------------------------------------------------

    def _work(self) -> None:
        began = time.monotonic()
        try:
            if self._is_host:
                with hosting(True, self._notice):
                    self._base, opened = patience.connect(lambda: self._factory(**self._kwargs))
                execute(Set(serving_key(self._notice), "1"), self._base)
            else:
                self._base, opened = join(self._factory, self._kwargs, self._notice, JOIN_LIMIT)
            self._patience = Patience(self._base, opened, self._waits.barrier)
            self._hosting_s = time.monotonic() - began
            self._ready("")
        except Exception as error:  # the factory is the user's; the rank learns why
            self._ready(str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}")
            return
        with patience.bounded(self._patience):
            self._perform_tasks()

    def _perform_tasks(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except (ResilienceError, RuntimeError, OSError, ValueError) as error:
                self._emit(events.StoreLost(f"{type(error).__name__}: {error}"[:500]))

    def _begin(self, begin: messages.Begin) -> None:
        self._begun = begin
        self._waits = begin.waits
        if getattr(self._base, "is_hosted_here", False):
            self._emit(events.StoreHosted("wrapper", self._base.host, self._base.port, self._hosting_s))
        if self._patience is not None:
            self._patience.limit = begin.waits.barrier
        self._store = dist.PrefixStore(begin.prefix, self._base)
        folder = agree_on_folder(self._store, begin.origin.node)
        self._supervisor = Supervisor(begin, folder, self._connect, self._represent, self._emit)
        self._supervisor.start()

    def _connect(self) -> Any:
        return connect(self._factory, self._kwargs, self._notice)

    def _represent(self, record: InterruptionRecord) -> None:
        """Stand in for a rank of somebody else, whose own monitor is gone. Runs in a thread of its own."""
        store = dist.PrefixStore(self._begun.prefix, self._connect())
        self._emit(self._drive_stand_in(record, store)[0])

    def _interrupt(self, record: InterruptionRecord) -> None:
        assert record.iteration is not None
        at = Keys(record.iteration)
        seat = self._last_seat(record.rank, self._store)
        if seat.iteration == record.iteration:  # its stacks are on record, and it may not be able to say so
            drive(arrive(at.witnessed, seat.rank, seat.world_size), self._store)
        asked = report(at, encode(record), symptom(record).is_own)
        drive(asked, self._store, lambda operation: note_arrival(operation, self._store, record, self._emit))
        if record.iteration != self._witnessed_in:
            self._witnessed_in = record.iteration
            self._await_witnesses(at, seat)
        self._are_others_seen = True

    def _await_witnesses(self, at: Keys, seat: Seat) -> None:
        """Put on record whether the other ranks have looked at themselves before anything was cut."""
        began = time.monotonic()
        missing: list[int] = []
        if not drive(witness(at, seat.rank, seat.world_size, watch.EVIDENCE), self._store):
            absent = drive(unwitnessed(at, seat.world_size), self._store)
            missing = [initial for initial in range(self._world_size) if self._sits_at(initial, at.iteration, absent)]
        self._emit(events.OthersSeen(seat.initial_rank, tuple(missing), duration_s=time.monotonic() - began))

    def _sits_at(self, initial_rank: int, iteration: int, ranks: Collection[int]) -> bool:
        """Whether a rank has one of these seats in an iteration."""
        if not ranks:
            return False
        seat = self._last_seat(initial_rank, self._store)
        return seat.iteration == iteration and seat.rank in ranks

    def _host(self, iteration: int) -> None:
        """Publish a store for the process groups of one iteration; make the next one ahead of time."""
        began = time.monotonic()
        server = publish_server(iteration, self._begun.base_host, self._store, self._spare)
        self._spare = None
        self._emit(events.StoreHosted("iteration", server.host, server.port, time.monotonic() - began))
        self._servers.append(server)
        del self._servers[:-KEPT_SERVERS]
        self._spare = iteration_server(server.host)

    def _stand_in(self, record: InterruptionRecord) -> None:
        self._result, seat = self._drive_stand_in(record, self._store)
        self._job_goes_on = True
        if record.exit is not None and self._terminal and telling.ends_with_ranks() and self._was_last_rank_0(seat):
            standard.end_of_killed(self._terminal, self._folder, record.exit)

    def _was_last_rank_0(self, seat: Seat | None) -> bool:
        """Return True if no rank goes on after this one, which died in that seat, and it was rank 0. No rank goes on
        where the store is lost."""
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
        """Represent a rank. Return how that went, and the last seat that the rank had."""
        began = time.monotonic()
        result: Any
        seat: Seat | None = None

        def perform(operation: restart.Operation) -> Any:
            nonlocal seat
            if not isinstance(operation, Assign):
                return note_arrival(operation, store, record, self._emit)
            seat = self._assign(operation)
            return seat

        try:
            seat = self._last_seat(record.rank, store)
            result = drive(stand_in(seat, self._begun.waits, encode(record)), store, perform, chunk=3600.0)
            error = ""
        except (ResilienceError, RuntimeError, OSError) as failed:
            result, error = "failed", f"{type(failed).__name__}: {failed}"[:500]
        return events.RankStoodInFor(record.rank, result, time.monotonic() - began, error), seat

    def _last_seat(self, initial_rank: int, store: StoreLike) -> Seat:
        """The seat the rank published last, or the one it had at the call."""
        (text,) = execute(Read((seat_key(initial_rank),)), store)
        if text is not None:
            return encoding.from_json(text, Seat)
        size = self._world_size
        return Seat(initial_rank, initial_rank, size, size, restart.ENTRY)

    @property
    def _world_size(self) -> int:
        """How many ranks began the call."""
        size = self._begun.origin.world_size
        assert size is not None
        return size

    def _assign(self, operation: Assign) -> Seat | None:
        store = hook_store(self._begun.prefix, self._base)
        following = seat_after(self._hooks, operation, store, self._begun.origin.world_size)
        if following is not None and following.rank == 0:
            self._host(following.iteration)
        return following

    # -- leaving --------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Tell the neighbours, and the host of the store, that this rank is accounted for and connected no more."""
        if self._supervisor is not None:
            self._supervisor.stop()
            rank = self._begun.origin.initial_rank
            assert rank is not None
            execute(Set(finished_key(rank), "1"), self._store)
            last = Keys(self._last_seat(rank, self._store).iteration)
            self._job_goes_on |= execute(Read((last.outcome,)), self._store) != (restart.COMPLETED,)
            self._exit_key = f"{last.exit}/done"
            execute(Add(LEFT_KEY, 1), self._store)  # the last operation of this rank and its monitor

    def _have_all_left(self) -> bool:
        """Whether each rank and its monitor have done their last operation, or each rank has and its monitor had time
        to. Later connections are of the next call, whose ranks wait for this one to go."""
        try:
            if execute(Add(LEFT_KEY, 0), self._store) >= self._world_size:
                return True
            if self._out_since is None and execute(Check((self._exit_key,)), self._store):
                self._out_since = time.monotonic()
            return self._out_since is not None and time.monotonic() - self._out_since >= MONITORS_LIMIT
        except ResilienceError:
            return True

    def _await_last_client(self) -> None:
        """A host leaves when all have left or nobody else is connected any more; after a call that completed, at the
        latest when the barrier's limit has passed. While a job goes on without its rank it stays, whether the rank has
        died or has left."""
        ports = {server.port for server in self._servers}
        if self._is_host and isinstance(self._base, dist.TCPStore):
            ports.add(self._base.port)
        deadline = float("inf") if self._job_goes_on else time.monotonic() + self._waits.barrier
        looks = 0
        while ports and looks < LOOKS and time.monotonic() < deadline and not self._have_all_left():
            looks = 0 if connections.has_foreign_clients(ports) else looks + 1
            time.sleep(LOOK_EVERY)


def iteration_server(address: str) -> dist.TCPStore:
    """Return a fresh server for the process groups of one iteration, on a port of its own."""
    listener = listen_beside_free_ports(address)
    port = listener.getsockname()[1]
    with short_lookups():
        return dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def publish_server(iteration: int, base_host: str, store: StoreLike, server: Any = None) -> Any:
    """Make `server`, or a fresh one, the store of the process groups of one iteration."""
    if server is None or not are_next_free(server.host, server.port):  # made ahead of time, and overtaken
        server = iteration_server(local_address(base_host))
    execute(Set(Keys(iteration).server, f"{server.host}:{server.port}"), store)
    return server


def hook_store(prefix: str, base: Any) -> Any:
    """The part of the store that hooks get, apart from the protocol's own keys."""
    return dist.PrefixStore(f"{prefix}hooks", base)
