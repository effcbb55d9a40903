"""What does a call need around the function: the rank's monitor, its page, its connections to the store.

A session belongs to one call and is closed with it, however the call ends. Then no thread, connection, descriptor,
mapping or monitor remains. The process's next call, of this function or another, inherits only the job's name, which
all calls of a process share. It can fork its monitor just like the first call."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from resilience.core import restart
from resilience.core.observation import Doing
from resilience.core.restart import CompareSet
from resilience.core.silences import WARM_UP
from resilience.core.watched import watched
from resilience.errors import ConfigurationError, MonitorError, ResilienceError
from resilience.facts import events
from resilience.facts.configuration import Configuration
from resilience.facts.deadlines import recorded_name
from resilience.facts.identity import FileOwner, Origin
from resilience.facts.interruptions import Detector, Interruption, InterruptionRecord, ProgramPosition
from resilience.facts.limits import NO_LIMIT, Limit, Limits, Rule
from resilience.facts.seats import Seat
from resilience.inprocess._runtime import launcher_check, supervision, unstarted
from resilience.inprocess._runtime.job_description import endpoint, job_of, launch_in, new_job_id
from resilience.inprocess._runtime.joining import join
from resilience.inprocess._runtime.lone_rank import LoneRank
from resilience.inprocess._runtime.monitor_process import Handle, await_earlier, start
from resilience.inprocess._runtime.monitor_store import publish_server
from resilience.inprocess._runtime.operations import not_hosted
from resilience.inprocess._runtime.progress import forget_request, request_tick
from resilience.inprocess.abort import abort_wait
from resilience.inprocess.hook_store import CallStore
from resilience.inprocess.store import Notice, hosting
from resilience.monitor import client, messages
from resilience.monitor.collectives import last_collectives
from resilience.monitor.page import RankSide
from resilience.system import attempts, call_with_timeout, collective_calls, patience, private, processes
from resilience.system.attempts import Launch
from resilience.system.channel import LIMIT
from resilience.system.environment import (
    Launcher,
    LauncherRendezvous,
    Settings,
    has_agent,
    launched_folder,
    node_name,
    torchrun_restarts_left,
    unknown_variables,
)
from resilience.system.interrupt import Swallow
from resilience.system.patience import Patience
from resilience.system.signal_handlers import Deferred
from resilience.system.store import StoreLike, drive, execute
from resilience.telemetry import log, standard
from resilience.telemetry.emitter import Emitter
from resilience.telemetry.recording import RecordFile, configuration_of
from resilience.telemetry.standard import StandardLog

if TYPE_CHECKING:
    from resilience.inprocess.state import State
    from resilience.inprocess.wrap import Wrapper

_launch: Launch | None = None  # of earlier calls: all calls of a process belong to one launch
_advised: set[str] = set()  # each advice about a monitor is given once, by the first call that has a reason for it
_open: list[Session] = []  # at most one
_kept_in_child: list[Session] = []


class Session:
    """One call's monitor and store connections. Use `open` to get one."""

    def __init__(self, wrapper: Wrapper, number: int, state: State) -> None:
        self.settings = Settings.from_environment()
        self.node = node_name()
        self._run_prefix = f"resilience/{self.settings.run_id}/{self.settings.restart_count}/"
        self._prefix = f"{self._run_prefix}{number}/"
        self._notice = Notice(self._prefix, number)
        self._folder = Path()
        self._began = time.monotonic()
        self._closing = threading.Event()
        self._others_go_on = False  # without this rank, which has left
        self._said_goodbye = False
        self._has_completed = False
        self._call = number
        self._interval = wrapper.progress_watchdog_interval.total_seconds()
        self._monitor: Handle
        self._member: supervision.Member
        self.page: RankSide
        self._ticker: threading.Thread | None = None
        self._own_file: RecordFile | None = None  # once the monitor is lost
        self._lone: LoneRank
        # Read once: each iteration sets the variables, and the function may change them.
        self._base_host = LauncherRendezvous.from_environment().server_host
        self._base: Any = None
        self._watch_base: Any = None
        self._patience: Patience | None = None
        self._patiences: tuple[Patience, ...] = ()
        self.watch_patience: Patience
        self.emitter = Emitter(Origin("", "", "rank", os.getpid()), [])
        self.store: StoreLike
        self.watch_store: StoreLike
        self.hook_store: CallStore
        self._server: Any = None

    @classmethod
    @contextmanager
    def open(cls, wrapper: Wrapper, function: str, number: int, state: State) -> Iterator[Session]:
        """Open a call's session, and close it when the body is left. A forked child does not close it."""
        began = time.monotonic()
        session: Session | None = None
        try:
            try:
                session = cls(wrapper, number, state)
                session._start_monitor(wrapper, state)
                session._connect(wrapper, state)
            except Exception as error:
                _failed_to_start(function, number, state, error, time.monotonic() - began)
                raise
            assert session._patience is not None
            with patience.bounded(session._patience):
                session._begin(wrapper, function, number, state)
                yield session
        finally:
            if session in _open:  # not in a forked child, nor without a monitor
                _open.remove(session)
                try:
                    session._close()
                except BaseException:  # of a signal handler
                    session._abandon()
                    raise

    def _start_monitor(self, wrapper: Wrapper, state: State) -> None:
        is_host = state.initial_rank == 0
        await_earlier(wrapper.barrier_timeout.total_seconds() if is_host else 0.0)
        with processes.job_signals_blocked():  # a handler that raises must not part the monitor from its session
            self._monitor = start(wrapper, state, is_host, self._notice)
            self.page = self._monitor.page
            _open.append(self)

    def _connect(self, wrapper: Wrapper, state: State) -> None:
        """Connect to the store, which this monitor or another one hosts, and start to listen to the monitor."""
        limit = wrapper.barrier_timeout.total_seconds()
        if state.initial_rank == 0:
            self._monitor.await_ready(limit)
            if self._monitor.error:
                _raise_factory_error(wrapper, self._notice, self._monitor.error)
        self._base, rank_sockets = join(wrapper.store_factory, wrapper.store_kwargs, self._notice, limit, is_rank=True)
        self._watch_base, watcher_sockets = join(wrapper.store_factory, wrapper.store_kwargs, self._notice, limit)
        heartbeat_timeout = wrapper.heartbeat_timeout.total_seconds()
        who = self.node, state.initial_rank
        self._lone = LoneRank(self._base, self._prefix, *who, heartbeat_timeout, self._closing, self.emit)
        asks, answered = self.page.asks_store, self.page.store_answered
        self._patience = Patience(self._base, rank_sockets, limit, self._interval, asks, answered)
        self.watch_patience = Patience(self._watch_base, watcher_sockets, limit, self._interval)
        self._patiences = self._patience, self.watch_patience
        call_with_timeout.start(self._new_ticker)

    def _begin(self, wrapper: Wrapper, function: str, number: int, state: State) -> None:
        self.store = dist.PrefixStore(self._prefix, self._base)
        self.watch_store = dist.PrefixStore(self._prefix, self._watch_base)
        self.hook_store = CallStore(self._prefix, self._base, self.emit)
        launch = self._agree_on_launch()
        cycle = int(self._agree("cycle", str(self._own_cycle)))
        folder = launched_folder() or self._usable_folder(self._root / launch.run_name)
        origin = Origin(
            job_id=launch.job_id,
            node=self.node,
            role="rank",
            pid=os.getpid(),
            attempt=launch.attempt,
            cycle=cycle,
            call=number,
            initial_rank=state.initial_rank,
            rank=state.rank,
            world_size=state.initial_world_size,
        )
        self.emitter = Emitter(origin, [self._monitor, StandardLog()])
        self._folder = folder
        configuration = configuration_of(folder, self.settings.calibration_key, state.initial_world_size)
        limits = _limits(wrapper, self.settings)
        limits, loaded = _add_learned(limits, wrapper, self.settings, folder, configuration)
        begin = messages.Begin(
            origin=origin,
            folder=os.fsencode(folder),
            prefix=self._prefix,
            limits=limits,
            waits=restart.WaitLimits(barrier=wrapper.barrier_timeout.total_seconds()),
            heartbeat_timeout=wrapper.heartbeat_timeout.total_seconds(),
            interval=wrapper.monitor_process_interval.total_seconds(),
            base_host=self._base_host,
            store=patience.server_of(self._base),
            job=job_of(origin, function) if state.initial_rank == 0 else None,
        )
        if not self._monitor.send(begin):
            raise MonitorError(
                f"the monitor of rank {state.initial_rank} did not learn that a call begins: it has ended, or the "
                f"message of {len(messages.encode(begin))} bytes is longer than {LIMIT} (limits of too many sections)"
            )
        if state.initial_rank == 0:
            self.emit(*([] if loaded is None else [loaded]))
            if (cycle, number) == (0, 0):
                launcher = Launcher.from_environment()
                lines = list(launcher_check.advice(launcher, wrapper.hard_timeout.total_seconds()))
                if not launcher.policy:  # our launcher has printed it
                    standard.show(f"records in {folder}")
                    lines += unknown_variables()
                self.emit(*map(events.ConfigurationAdvised, lines))
                self.emit(watched(limits, in_wrapper=True))
            new_advice = [line for line in self._monitor.advice if line not in _advised]
            _advised.update(new_advice)
            self.emit(*map(events.ConfigurationAdvised, new_advice))
        self._member = supervision.entry_of(state.initial_rank, os.getpid(), self._monitor.pid)
        try:
            # The other nodes must not look for this one before its monitor is connected. If the rank dies meanwhile,
            # its monitor stands in for it. If the monitor cannot connect, the rank continues without it. Half the
            # time for which the others wait in the first barrier.
            limit = wrapper.barrier_timeout.total_seconds() / 2
            if not self._monitor.await_connected(limit):
                self.emit(events.HookFailed("monitor", f"it was not connected to the store within {limit:g} s"))
        finally:  # also if this rank ends here: the others then notice it
            supervision.announce(self.store, self.node, self._member)
        self._announce(function)
        client.activate(self.page)
        log.configure(folder / "logs" / f"{FileOwner(self.node, state.initial_rank).name}.jsonl", self._log_context)

    @property
    def _root(self) -> Path:
        return Path(self.settings.run_dir).absolute()

    def _usable_folder(self, folder: Path) -> Path:
        """Return a writable run folder: this one, or a private one of this node. The node's ranks agree on it, and the
        terminal names it. If there is none either, return this one: data written there is lost, and counted."""
        reason = attempts.why_unusable(folder)
        if not reason:
            return folder
        try:
            private_folder = attempts.instead_of(folder)
        except OSError:
            return folder
        agreed = Path(self._agree(f"folder/{self.node}", str(private_folder)))
        if agreed == private_folder:
            standard.show(f"{folder} cannot be used: {reason}; the records of {self.node} are kept in {private_folder}")
        else:
            private_folder.rmdir()
            private.remove(str(private_folder.parent))
        return agreed

    def _agree_on_launch(self) -> Launch:
        """Return the launch of all ranks: that of earlier calls, the launcher's, or a new one."""
        global _launch
        launch = _launch
        if launch is None and launched_folder() is not None and self.settings.job_id is not None:
            launch = Launch(self.settings.job_id, self.settings.attempt_hint)
        if launch is not None:
            _launch = attempts.share(self._base, launch, self._launch_prefix)
        else:
            process = f"{self.node}/{os.getpid()}/{secrets.token_hex(4)}"
            keys, start = self._launch_prefix, self.settings.restart_count
            _launch = attempts.agree(self._base, self._root, process, self._allocate, keys, start, standard.show)
        return _launch

    @property
    def _is_in_agents_store(self) -> bool:
        """Return True if the call's store is the launcher's. torchrun keeps it when it starts the ranks again."""
        rendezvous = LauncherRendezvous.from_environment()
        return rendezvous.is_agents and getattr(self._base, "port", None) == rendezvous.port

    @property
    def _launch_prefix(self) -> str:
        """Return the prefix of the launch's keys: all starts of the ranks by one agent are one launch."""
        return f"resilience/{self.settings.run_id}/" if self._is_in_agents_store else self._run_prefix

    @property
    def _own_cycle(self) -> int:
        """Return the cycle that this process's environment shows."""
        if self.settings.cycle is None and self._is_in_agents_store:
            return self.settings.restart_count  # without a run id, this number alone does not show a restart
        return self.settings.cycle or 0

    def _allocate(self) -> Launch:
        """Return a new launch, or the one that this start of the ranks continues. Raises: ConfigurationError."""
        settings = self.settings
        job_id = settings.job_id or new_job_id()
        if settings.cycle and settings.attempt is None:  # a launcher has started the ranks again
            attempt = attempts.newest(self._root, job_id, lambda folder: launch_in(folder) == endpoint())
            if attempt is not None:
                return Launch(job_id, attempt)
        attempt_wanted = None if settings.cycle else settings.attempt
        return attempts.allocate(self._root, job_id, attempt_wanted, settings.attempt_hint)

    def _agree(self, name: str, proposal: str) -> str:
        return str(execute(CompareSet(f"{self._run_prefix}{name}", proposal), self._base))

    def _close(self) -> None:
        """Remove everything of the call from this process."""
        self.leave()
        self._closing.set()
        if hasattr(self, "_lone"):  # else the call has not begun
            self._lone.end()
        self.page.doing(Doing.OUTSIDE)  # the monitor does not watch what follows the call
        client.deactivate()
        log.configure(None, None)
        # Before the monitor learns it: once all monitors know, no rank is connected to the store.
        for name in ("_base", "_watch_base", "_server", "store", "watch_store", "hook_store", "watch_patience"):
            self.__dict__.pop(name, None)
        self._patience, self._patiences = None, ()
        self._monitor.close(self._join_ticker, self._has_completed)
        forget_request()
        self.emitter.replace_sinks([])
        if self._own_file is not None:
            self._own_file.close()

    def _abandon(self) -> None:
        """Let monitor and ticker end by themselves, because an exception has kept `_close` from ending them. The page
        stays mapped, and the stacks' file open."""
        self.page.leave_call(self._call)  # `leave` may have been interrupted too
        self._closing.set()
        if hasattr(self, "_lone"):
            self._lone.end(0.0)
        self._monitor.abandon()
        client.deactivate()
        log.configure(None, None)

    def _join_ticker(self, limit: float) -> bool:
        if self._ticker is None or not self._ticker.is_alive():  # if it begins after this, it finds `_closing` set
            return True
        self._ticker.join(limit)
        return not self._ticker.is_alive()

    def _forget(self) -> None:
        """Drop the parent's session in a forked child. Connections stay open, because another thread of the parent may
        have held one of their locks."""
        self.emitter.replace_sinks([])
        self._said_goodbye = False  # `leave` must not use the parent's connection
        self._monitor.forget()
        _kept_in_child.append(self)

    # -- for the call ---------------------------------------------------------------------------

    def say_goodbye(self) -> None:
        """Note that the store knows this rank's end: no stand-in has to represent it in this call."""
        supervision.depart(self.store, self._member, self._monitor.is_working)
        self.page.say_goodbye(self._call)
        self._said_goodbye = True

    def leave(self) -> None:
        """Note that the rank has left the call, however that went. Without a goodbye, its monitor now stands in for it.
        Repeating it changes nothing."""
        self.page.leave_call(self._call)
        if self._said_goodbye:
            # The monitor may have been lost since, while a last hook ran. A stopped one may host the store, for whose
            # answer nobody would end the wait any more.
            supervision.depart(self.store, self._member, processes.is_alive(self._member.monitor))
            self._said_goodbye = False
        self._monitor.send(messages.LeftCall())

    @property
    def is_critical(self) -> bool:
        """Return True if the store ends with this process."""
        return self.emitter.origin.initial_rank in getattr(self._base, "critical_ranks", ())

    def _announce(self, function: str) -> None:
        """Emit the record of the call's start."""
        from resilience import __version__

        self.emit(
            events.CallStarted(
                function=function,
                world_size=self.emitter.origin.world_size or 1,
                resilience_version=__version__,
                torch_version=str(torch.__version__),
                python_version=sys.version.split()[0],
                hostname=socket.gethostname(),
                monitor=self._monitor.how,
                monitor_reason=self._monitor.reason,
                monitor_start_s=self._monitor.start_s,
                restarts_left=_restarts_left(),
            )
        )

    def emit(self, *new: events.Event) -> None:
        self.emitter.emit(*new)

    def swallowed(self, swallow: Swallow) -> None:
        self.emit(events.InterruptSwallowed(swallow.file, swallow.line, swallow.function))

    def signal_deferred(self, deferred: Deferred) -> None:
        self.emit(events.SignalDeferred(*deferred))

    def see_who_goes_on(self, left: Seat | None, limit: float) -> None:
        """Find out whether other ranks continue without this one. A job's last rank 0 prints how the job ended, so only
        rank 0 asks. It waits at most `limit` seconds for the others to agree. left: the seat it has left, if any."""
        if left is not None and left.rank == 0:
            with contextlib.suppress(ResilienceError):
                terminated = drive(restart.terminated_of(left, limit), self.store)
                self._others_go_on = terminated is not None and len(terminated) < left.world_size

    def ended(self, iterations: int, restarts: int, kind: str, error: str) -> None:
        """Emit the record of the call's end. restarts: after which the function began again. kind, error: the type and
        the words of the exception that ended the call, empty if it completed."""
        outcome: events.Outcome = "left" if error else "completed"
        self._has_completed = not error
        self.emit(events.CallEnded(outcome, iterations, time.monotonic() - self._began, error))
        if self.emitter.origin.rank == 0 and not self._others_go_on and not has_agent():
            standard.ENDING.ended(self._folder, restarts, kind)

    def move_to(self, seat: Seat) -> None:
        """Move the rank to its seat in the next iteration. Rank 0 also has the iteration's store hosted."""
        self.emitter.move(iteration=seat.iteration, rank=seat.rank, world_size=seat.world_size)
        self.page.set_seat(seat)
        collective_calls.begin()
        if seat.rank == 0 and not self._monitor.send(messages.HostStore(seat.iteration)):
            self.host_store(seat.iteration)  # the monitor is gone; if it fails, `ensure_server` tries again

    def host_store(self, iteration: int) -> None:
        """Host the iteration's store in this process. One that ends with the rank is better than none. If it cannot be
        hosted, that is on record. Raises: StoreError."""
        try:
            self._server = publish_server(iteration, self._base_host, self.store)
        except (OSError, RuntimeError) as error:
            self.emit(not_hosted(iteration, error))

    def _log_context(self) -> dict[str, Any]:
        origin = self.emitter.origin
        sections = self.page.open_sections
        return {"origin": origin, "step": self.page.step_value, "section": sections[-1] if sections else None}

    def position(self) -> ProgramPosition:
        """Return where the rank is. Any thread."""
        sections = tuple(map(recorded_name, self.page.open_sections))
        return ProgramPosition(self.page.step_value, sections, last_collectives(self.page.collectives()))

    # -- the ticker -----------------------------------------------------------------------------

    def _new_ticker(self) -> threading.Thread:
        # Assigned before it starts: a signal handler may raise while `Thread.start` waits for the thread.
        self._ticker = threading.Thread(target=self._tick_until_closed, name="resilience-ticker", daemon=True)
        return self._ticker

    def _tick_until_closed(self) -> None:
        """Ask the main thread for proof of life, end waits for the store that exceed their limit, and notice a lost
        monitor."""
        if self._closing.is_set():  # the start was interrupted, and `_join_ticker` did not wait for this thread
            return
        while self._monitor.is_alive(self._interval):
            self.page.ran()
            request_tick(self.page)
            self._check_patience()
            if not self._monitor.is_working:
                self._lone.start()
        if not self._closing.is_set():
            self._monitor_lost()
        while not self._closing.wait(self._interval):
            self._lone.start()
            self._check_patience()

    def _check_patience(self) -> None:
        for store_patience in self._patiences:
            store_patience.check()

    def _monitor_lost(self) -> None:
        """Continue unmonitored, and record it. From now on this process writes its record file itself."""
        origin = self.emitter.origin
        assert origin.initial_rank is not None
        path = self._folder / "records" / f"{FileOwner(origin.node, origin.initial_rank).name}.jsonl"
        self._own_file = RecordFile(path)
        self.emitter.replace_sinks([self._own_file, StandardLog()])
        record = InterruptionRecord(
            rank=origin.initial_rank,
            interruption=Interruption.MONITOR_PROCESS_EXCEPTION,
            message=f"monitor process {self._monitor.pid} is gone; the rank continues unmonitored",
            detector=Detector("channel"),
            iteration=origin.iteration,
            active_rank=origin.rank,
            node=origin.node,
            pid=os.getpid(),
            detected_wall_ns=time.time_ns(),
        )
        self.emit(events.MonitorLost(self._monitor.pid, "its channel closed"), events.RankInterrupted(record))


def _restarts_left() -> int | None:
    """Return how often torchrun may start the ranks again, None if it has not started them, or does not say it."""
    with contextlib.suppress(ConfigurationError):
        return None if has_agent() else torchrun_restarts_left()
    return None


def _failed_to_start(function: str, number: int, state: State, error: Exception, duration: float) -> None:
    settings, rank, size = Settings.from_environment(), state.initial_rank, state.initial_world_size
    job = partial(job_of, function=function)
    unstarted.record(settings, node_name(), number, rank, size, error, duration, job)


def _forget_in_child() -> None:
    for session in _open:
        session._forget()
    _open.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _raise_factory_error(wrapper: Wrapper, notice: Notice, message: str) -> NoReturn:
    """Call the factory here, so that the caller gets its exception: it failed in the monitor and should fail here too.

    Raises: what the factory raises; MonitorError if it fails only in the monitor."""
    with hosting(True, notice):
        wrapper.store_factory(**wrapper.store_kwargs)
    raise MonitorError(f"the monitor could not create the store, but this process can: {message}")


def _limits(wrapper: Wrapper, settings: Settings) -> Limits:
    """Return the limits that the monitor enforces, from the wrapper's options and the environment."""
    soft, hard = wrapper.soft_timeout.total_seconds(), wrapper.hard_timeout.total_seconds()
    both = Limit(soft, hard)
    only_hard = Limit(None, hard)
    # The rank itself gives up at barrier_timeout; this limit is for a rank that cannot.
    store = Limit(None, wrapper.barrier_timeout.total_seconds() + hard - soft)

    def soft_and_hard(limit: float | None) -> Limit:
        return NO_LIMIT if limit is None else Limit(limit, limit + hard - soft)

    # To this launcher, a rank that ends by SIGTERM looks preempted by a scheduler.
    restarts_all_workers = Launcher.from_environment().policy == "any-failed"
    return Limits(
        signal="SIGKILL" if restarts_all_workers else "SIGTERM",
        watchdog=both,
        store=store,
        ping=both,
        hook=only_hard,
        leave=only_hard,
        abort=abort_wait(settings.abort_wait, soft, hard),
        step=soft_and_hard(settings.step_timeout),
        sections={name: soft_and_hard(limit) for name, limit in settings.section_timeouts.items()},
        warmup_occurrences=WARM_UP,
        grace=wrapper.termination_grace_time.total_seconds(),
        rule=Rule(settings.hang_first_limit, settings.hang_least_limit, hard - soft) if settings.detect_hangs else None,
    )


def _add_learned(
    limits: Limits, wrapper: Wrapper, settings: Settings, folder: Path, own: Configuration
) -> tuple[Limits, events.TimeoutsLoaded | None]:
    """Add learned limits, if there are any. Past one, all ranks restart; later the rank is ended."""
    if settings.timeouts is None:
        return limits, None
    from resilience.system import timeouts_file  # reads YAML, which no other code here does

    margin = (wrapper.hard_timeout - wrapper.soft_timeout).total_seconds()
    return timeouts_file.learned(settings.timeouts, folder.parent, limits, own, settings.timeouts_shadow, margin)
