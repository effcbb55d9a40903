"""What does a call need around the function: the rank's monitor, its page, its connections to the store.

A session belongs to one call and is closed at its end, however the call ends: threads, connections, descriptors,
mappings and the monitor go. The next call of the process, of the same function or of another one, inherits nothing
but the name of the job, which all calls of a process share, and can fork its monitor as the first one could."""

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from resilience.adapters import collective_calls, launches, patience, private
from resilience.adapters.environment import (
    Exporting,
    Launcher,
    Rendezvous,
    Settings,
    has_agent,
    launched_folder,
    local_world_size,
    node_name,
)
from resilience.adapters.interrupt import Swallow
from resilience.adapters.launches import Launch
from resilience.adapters.patience import Patience
from resilience.adapters.store import StoreLike, drive, execute
from resilience.core import events, restart, watch
from resilience.core.attribution import Detector, Interruption, InterruptionRecord
from resilience.core.configuration import Configuration
from resilience.core.identity import Job, Origin
from resilience.core.masking import masked
from resilience.core.restart import CompareSet, Seat
from resilience.core.silences import Rule
from resilience.core.watch import Doing
from resilience.core.watched import watched
from resilience.errors import DecodeError, MonitorError, ResilienceError
from resilience.inprocess import launched, supervision, unstarted
from resilience.inprocess.abort import abort_wait
from resilience.inprocess.joining import join
from resilience.inprocess.monitor_process import Handle, start
from resilience.inprocess.outlet import hook_store, publish_server
from resilience.inprocess.progress import forget_request, request_tick
from resilience.inprocess.store import Notice, hosting
from resilience.monitor import client, messages
from resilience.telemetry import log, standard
from resilience.telemetry.emitter import Emitter
from resilience.telemetry.recording import RecordFile, read_job
from resilience.telemetry.standard import StandardLog

if TYPE_CHECKING:
    from resilience.inprocess.state import State
    from resilience.inprocess.wrap import Wrapper

READY_LIMIT = 120.0  # seconds for a monitor to host the store; an executed one imports torch first

_launch: Launch | None = None  # of the calls before: all calls of a process belong to one launch
_open: list[Session] = []  # at most one
_kept_in_child: list[Session] = []


class Session:
    """One call's monitor and store connections, to be had from `open`."""

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
        self._call = number
        self._interval = wrapper.progress_watchdog_interval.total_seconds()
        self._monitor: Handle = start(wrapper, state, state.initial_rank == 0, self._notice)
        self.page = self._monitor.page
        self._ticker = threading.Thread(target=self._tick, name="resilience-ticker", daemon=True)
        self._own_file: RecordFile | None = None  # once the monitor is lost
        self._base: Any = None
        self._watch_base: Any = None
        self._patience: Patience | None = None
        self._patiences: tuple[Patience, ...] = ()
        self.watch_patience: Patience
        self.emitter = Emitter(Origin("", "", "rank", os.getpid()), [])
        self.store: StoreLike
        self.watch_store: StoreLike
        self.hook_store: Any
        self._server: Any = None

    @classmethod
    @contextmanager
    def open(cls, wrapper: Wrapper, function: str, number: int, state: State) -> Iterator[Session]:
        """Give a call its session, and close it when the body is left. A forked child leaves it to its parent."""
        pid, began = os.getpid(), time.monotonic()
        session: Session | None = None
        try:
            try:
                session = cls(wrapper, number, state)
                _open.append(session)
                session._connect(wrapper, state)
            except Exception as error:
                _failed_to_start(function, number, state, error, time.monotonic() - began)
                raise
            assert session._patience is not None
            with patience.bounded(session._patience):
                session._begin(wrapper, function, number, state)
                yield session
        finally:
            if session is not None and os.getpid() == pid:
                _open.remove(session)
                session._close()

    def _connect(self, wrapper: Wrapper, state: State) -> None:
        """Connect to the store that this monitor or another one hosts, and start to listen to the monitor."""
        if state.initial_rank == 0:
            self._monitor.await_ready(READY_LIMIT)
            if self._monitor.error:
                _raise_of_store_factory(wrapper, self._notice, self._monitor.error)
        limit = wrapper.barrier_timeout.total_seconds()
        self._base, own = join(wrapper.store_factory, wrapper.store_kwargs, self._notice, limit, is_rank=True)
        self._watch_base, watchers = join(wrapper.store_factory, wrapper.store_kwargs, self._notice, limit)
        self._patience = Patience(self._base, own, limit, self.page.asks_store, self.page.store_answered)
        self.watch_patience = Patience(self._watch_base, watchers, limit)
        self._patiences = self._patience, self.watch_patience
        self._ticker.start()

    def _begin(self, wrapper: Wrapper, function: str, number: int, state: State) -> None:
        self.store = dist.PrefixStore(self._prefix, self._base)
        self.watch_store = dist.PrefixStore(self._prefix, self._watch_base)
        self.hook_store = hook_store(self._prefix, self._base)
        launch = self._agree_on_launch()
        cycle = int(self._agree("cycle", str(self.settings.cycle or 0)))
        folder = launched_folder() or self._usable(self._root / launch.run_name)
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
        own = _configuration(folder, self.settings.calibration_key, state.initial_world_size)
        limits, told = _learned(_limits(wrapper, self.settings), wrapper, self.settings, folder, own)
        self._monitor.send(
            messages.Begin(
                origin=origin,
                folder=os.fsencode(folder),
                prefix=self._prefix,
                limits=limits,
                waits=restart.Limits(barrier=wrapper.barrier_timeout.total_seconds()),
                heartbeat_timeout=wrapper.heartbeat_timeout.total_seconds(),
                interval=wrapper.monitor_process_interval.total_seconds(),
                base_host=Rendezvous.from_environment().server_host,
                job=_job(origin, function) if state.initial_rank == 0 else None,
            )
        )
        if state.initial_rank == 0:
            self.emit(*([] if told is None else [told]))
            if (cycle, number) == (0, 0):
                if not Launcher.from_environment().policy:  # our launcher has said it
                    standard.show(f"records in {folder}")
                lines = launched.advice(Launcher.from_environment(), wrapper.hard_timeout.total_seconds())
                self.emit(*map(events.ConfigurationAdvised, lines))
                self.emit(watched(limits))
        supervision.announce(
            self.store, self.node, supervision.entry_of(state.initial_rank, os.getpid(), self._monitor.pid)
        )
        self._announce(function)
        client.activate(self.page)
        log.configure(folder / "logs" / f"{self.node}-{state.initial_rank}.jsonl", self._log_context)

    @property
    def _root(self) -> Path:
        return Path(self.settings.run_dir).absolute()

    def _usable(self, folder: Path) -> Path:
        """Return a run folder that can be written to: this one, or one in a private place of this node, which its ranks
        agree on and the terminal names. Where there is none either, this one: what is written there is lost, and
        counted."""
        why = launches.why_unusable(folder)
        if not why:
            return folder
        try:
            own = launches.instead_of(folder)
        except OSError:
            return folder
        agreed = Path(self._agree(f"folder/{self.node}", str(own)))
        if agreed == own:
            standard.show(f"{folder} cannot be used: {why}; the account of {self.node} is kept in {own}")
        else:
            own.rmdir()
            private.remove(str(own.parent))
        return agreed

    def _agree_on_launch(self) -> Launch:
        """Return the launch that all ranks belong to: that of the calls before, the launcher's, or a new one."""
        global _launch
        known = _launch
        if known is None and launched_folder() is not None and self.settings.job_id is not None:
            known = Launch(self.settings.job_id, self.settings.attempt_hint)
        if known is not None:
            _launch = launches.share(self._base, known, self._run_prefix)
        else:
            process = f"{self.node}/{os.getpid()}/{secrets.token_hex(4)}"
            _launch = launches.agree(self._base, self._root, process, self._allocate, self._run_prefix)
        return _launch

    def _allocate(self) -> Launch:
        """Return a new launch, or the one that this start of the ranks continues. Raises: ConfigurationError."""
        settings = self.settings
        job_id = settings.job_id or _new_job_id()
        if settings.cycle and settings.attempt is None:  # a launcher has started the ranks anew
            attempt = launches.newest(self._root, job_id, lambda folder: _launch_in(folder) == _endpoint())
            if attempt is not None:
                return Launch(job_id, attempt)
        wanted = None if settings.cycle else settings.attempt
        return launches.allocate(self._root, job_id, wanted, settings.attempt_hint)

    def _agree(self, name: str, proposal: str) -> str:
        return str(execute(CompareSet(f"{self._run_prefix}{name}", proposal), self._base))

    def _close(self) -> None:
        """Leave nothing of the call behind in this process."""
        self.leave()
        self._closing.set()
        self.page.doing(Doing.OUTSIDE)  # what follows the call is none of our business
        client.deactivate()
        log.configure(None, None)
        # Before the monitor is told: when all monitors have been, no rank is connected to the store any more.
        for name in ("_base", "_watch_base", "_server", "store", "watch_store", "hook_store", "watch_patience"):
            self.__dict__.pop(name, None)
        self._patience, self._patiences = None, ()
        self._monitor.close(self._join_ticker)
        forget_request()
        self.emitter.replace_sinks([])
        if self._own_file is not None:
            self._own_file.close()

    def _join_ticker(self, limit: float) -> bool:
        if self._ticker.ident is not None:
            self._ticker.join(limit)
        return not self._ticker.is_alive()

    def _forget(self) -> None:
        """In a forked child: nothing of this is its own. Connections stay as they are, for another thread of the
        parent may have held a lock of theirs."""
        self.emitter.replace_sinks([])
        self._monitor.forget()
        _kept_in_child.append(self)

    # -- for the call ---------------------------------------------------------------------------

    def say_goodbye(self) -> None:
        """The store says all about this rank: nobody has to represent it in this call."""
        self.page.say_goodbye(self._call)

    def leave(self) -> None:
        """The rank is out of the call, whatever became of its way out. If it has not said goodbye, its monitor
        represents it now. Changes nothing when repeated."""
        self.page.leave_call(self._call)
        self._monitor.send(messages.Left())

    @property
    def is_critical(self) -> bool:
        """Whether the store ends with this process."""
        return self.emitter.origin.initial_rank in getattr(self._base, "critical_ranks", ())

    def _announce(self, function: str) -> None:
        """Put the call on record."""
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
            )
        )

    def emit(self, *new: events.Event) -> None:
        self.emitter.emit(*new)

    def swallowed(self, swallow: Swallow) -> None:
        self.emit(events.InterruptSwallowed(swallow.file, swallow.line, swallow.function))

    def see_who_goes_on(self, left: Seat | None, limit: float) -> None:
        """Learn whether others go on without this rank. The last rank 0 of a job says how it ended. So only rank 0
        asks, and waits at most `limit` seconds until the others have agreed. left: the seat it has left, if it has."""
        if left is not None and left.rank == 0:
            with contextlib.suppress(ResilienceError):
                terminated = drive(restart.terminated_of(left, limit), self.store)
                self._others_go_on = terminated is not None and len(terminated) < left.world_size

    def ended(self, iterations: int, error: str) -> None:
        """Put the end of the call on record. error: what left it, empty if it completed."""
        outcome: events.Outcome = "left" if error else "completed"
        self.emit(events.CallEnded(outcome, iterations, time.monotonic() - self._began, error))
        if self.emitter.origin.rank == 0 and not self._others_go_on and not has_agent():
            standard.ENDING.ended(self._folder, iterations - 1, error)

    def move_to(self, seat: Seat) -> None:
        """The rank has its seat in the next iteration; rank 0 has the iteration's store hosted."""
        self.emitter.move(iteration=seat.iteration, rank=seat.rank, world_size=seat.world_size)
        self.page.set_seat(seat)
        collective_calls.begin()
        if seat.rank == 0 and not self._monitor.send(messages.Host(seat.iteration)):
            # The monitor is gone: better a store that ends with this process than none.
            self._server = publish_server(seat.iteration, Rendezvous.from_environment().server_host, self.store)

    def _log_context(self) -> dict[str, Any]:
        origin = self.emitter.origin
        sections = self.page.open_sections
        return {"origin": origin, "step": self.page.step_value, "section": sections[-1] if sections else None}

    # -- the ticker -----------------------------------------------------------------------------

    def _tick(self) -> None:
        """Ask the main thread for proof of life, end what waits for the store for too long, and notice if the
        monitor is gone."""
        while self._monitor.is_alive(self._interval):
            self.page.ran()
            request_tick(self.page)
            self._check_patience()
        if not self._closing.is_set():
            self._monitor_lost()
        while not self._closing.wait(self._interval):
            self._check_patience()

    def _check_patience(self) -> None:
        for each in self._patiences:
            each.check()

    def _monitor_lost(self) -> None:
        """Go on unmonitored, and say so: from now on this process writes its record file itself."""
        origin = self.emitter.origin
        assert origin.initial_rank is not None
        path = self._folder / "records" / f"{origin.node}-{origin.initial_rank}.jsonl"
        self._own_file = RecordFile(path)
        self.emitter.replace_sinks([self._own_file, StandardLog()])
        record = InterruptionRecord(
            rank=origin.initial_rank,
            interruption=Interruption.MONITOR_PROCESS_EXCEPTION,
            message=f"monitor process {self._monitor.pid} is gone; the rank goes on unmonitored",
            detector=Detector("channel"),
            iteration=origin.iteration,
            active_rank=origin.rank,
            node=origin.node,
            pid=os.getpid(),
            detected_wall_ns=time.time_ns(),
        )
        self.emit(events.MonitorLost(self._monitor.pid, "its channel closed"), events.Interrupted(record))


def _failed_to_start(function: str, number: int, state: State, error: Exception, duration: float) -> None:
    unstarted.record(
        Settings.from_environment(),
        node_name(),
        number,
        state.initial_rank,
        state.initial_world_size,
        error,
        duration,
        lambda origin: _job(origin, function),
    )


def _forget_in_child() -> None:
    for session in _open:
        session._forget()
    _open.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _raise_of_store_factory(wrapper: Wrapper, notice: Notice, told: str) -> NoReturn:
    """Let the caller have the exception of its own factory: what failed in the monitor fails here as well.

    Raises: what the factory raises; MonitorError if it only fails in the monitor."""
    with hosting(True, notice):
        wrapper.store_factory(**wrapper.store_kwargs)
    raise MonitorError(f"the monitor could not make the store, though this process can: {told}")


def _limits(wrapper: Wrapper, settings: Settings) -> watch.Limits:
    """The limits that the monitor enforces, from the wrapper's options and the environment."""
    soft, hard = wrapper.soft_timeout.total_seconds(), wrapper.hard_timeout.total_seconds()
    both = watch.Limit(soft, hard)
    only_hard = watch.Limit(None, hard)
    # The rank itself gives up at barrier_timeout; this is for one that cannot.
    store = watch.Limit(None, wrapper.barrier_timeout.total_seconds() + hard - soft)

    def own(limit: float) -> watch.Limit:
        return watch.Limit(limit, limit + hard - soft)

    # A rank that ends by SIGTERM looks to this launcher as if a scheduler took its place away.
    is_whole = Launcher.from_environment().policy == "any-failed"
    return watch.Limits(
        signal="SIGKILL" if is_whole else "SIGTERM",
        watchdog=both,
        store=store,
        ping=both,
        hook=only_hard,
        leave=only_hard,
        abort=abort_wait(settings.abort_wait, soft, hard),
        step=watch.NO_LIMIT if settings.step_timeout is None else own(settings.step_timeout),
        sections={name: own(limit) for name, limit in settings.section_timeouts.items()},
        grace=wrapper.termination_grace_time.total_seconds(),
        rule=Rule(settings.hang_first_limit, settings.hang_least_limit, hard - soft) if settings.detect_hangs else None,
    )


def _learned(
    limits: watch.Limits, wrapper: Wrapper, settings: Settings, folder: Path, own: Configuration
) -> tuple[watch.Limits, events.TimeoutsLoaded | None]:
    """Add learned limits, if there are any: past one all restart, and later the rank is ended."""
    if settings.timeouts is None:
        return limits, None
    from resilience.adapters import timeouts_file  # reads YAML, which nobody else here does

    margin = (wrapper.hard_timeout - wrapper.soft_timeout).total_seconds()
    return timeouts_file.learned(settings.timeouts, folder.parent, limits, own, settings.timeouts_shadow, margin)


def _configuration(folder: Path | None, key: str, world_size: int) -> Configuration:
    """Return the configuration of the launcher's run that this process is part of; else that of this process."""
    if launched_folder() is not None and folder is not None:
        with contextlib.suppress(OSError, DecodeError):
            return read_job(folder).configuration
    script, *arguments = masked(sys.argv) or ("",)
    return Configuration(script, key, world_size, local_world_size() or 0, tuple(arguments), str(torch.__version__))


def _job(origin: Origin, function: str) -> Job:
    from resilience import __version__

    assert origin.world_size is not None
    return Job(
        job_id=origin.job_id,
        attempt=origin.attempt,
        cycle=origin.cycle,
        world_size=origin.world_size,
        function=function,
        command=masked(sys.argv),
        hostname=socket.gethostname(),
        resilience_version=__version__,
        torch_version=str(torch.__version__),
        python_version=sys.version.split()[0],
        started_wall_ns=time.time_ns(),
        configuration=_configuration(None, Settings.from_environment().calibration_key, origin.world_size),
        traceparent=Exporting.from_environment().traceparent,
        launch=_endpoint(),
    )


def _endpoint() -> str:
    """Return what tells this launch from others of the same job that run at the same time."""
    there = Rendezvous.from_environment()
    return f"{there.host}:{there.port}"


def _launch_in(folder: Path) -> str:
    """Return which launch a run folder belongs to, empty if that cannot be read."""
    try:
        return read_job(folder).launch
    except (OSError, DecodeError):
        return ""


def _new_job_id() -> str:
    return f"local-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
