"""Starts a rank's monitor, and holds the rank's end of the connection to it.

The monitor is forked if that is safe: before the store, process groups and CUDA, from a process with one thread.
It then costs milliseconds and shares the imported torch copy-on-write. If the process already has other threads
or CUDA, a forked child could inherit a lock that is never released. If it holds much memory, a forked child would keep
what the rank frees. The monitor is then executed as a fresh interpreter, which has to import what the store factory
needs; the records say why, and what it cost.

A monitor belongs to one call and ends with it. A process in between starts it and ends at once, so the monitor is
not a child of the rank: it leaves no zombie there, and no `wait` of user code returns it."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NoReturn

import msgspec

from resilience.errors import ConfigurationError, DecodeError, MonitorError, StoreError, error_in_words
from resilience.facts.events import RankInterrupted
from resilience.facts.printable import printable
from resilience.facts.records import Record
from resilience.inprocess._runtime.fork_safety import why_not_fork, why_rather_not_fork
from resilience.inprocess._runtime.monitor_store import MonitorStore
from resilience.monitor import messages
from resilience.monitor.calling_rank import CallingRank
from resilience.monitor.page import MonitorSide, Page, RankSide
from resilience.monitor.server import RankMonitor
from resilience.system import collective_calls, descriptors, processes, stacks, terminal, titles
from resilience.system.background import WRITER
from resilience.system.channel import Channel, ChannelClosed, close_all, pair
from resilience.telemetry import standard

if TYPE_CHECKING:
    from resilience.inprocess.rank_assignment import RankAssignment
    from resilience.inprocess.rank_filter import RankFilter
    from resilience.inprocess.state import State
    from resilience.inprocess.store import Notice
    from resilience.inprocess.wrap import Wrapper

StartMethod = Literal["forked", "executed"]
LISTEN = 0.5  # seconds between two checks whether a monitor that starts has ended
LEAVE_LIMIT = 1.0  # seconds that a call's end waits for its monitor; a monitor that hosts a store may run for longer

# (pid, start time) of monitors that a call's end did not wait for, each with True if its rank completed the call
_leaving: list[tuple[tuple[int, int], bool]] = []


class Plan:
    """The parts of a Wrapper that its monitor needs. Inherited by a forked monitor, pickled for an executed one."""

    def __init__(self, wrapper: Wrapper, state: State, is_host: bool, notice: Notice) -> None:
        self.is_host = is_host
        self.notice = notice
        self.store_factory: Callable[..., Any] = wrapper.store_factory
        self.store_kwargs: dict[str, Any] = wrapper.store_kwargs
        self.rank_assignment: RankAssignment | None = wrapper.rank_assignment
        self.rank_filter: RankFilter | None = wrapper.rank_filter
        self.initial_rank = state.initial_rank
        self.rank_pid, self.rank_start_time = processes.identity_of(os.getpid())
        self.terminal = terminal.path_of_stderr()
        self.logfile = (wrapper.monitor_process_logfile or "").format(rank=state.initial_rank)


class Handle:
    """The rank's end of the connection: page, channel, and the monitor's state."""

    def __init__(self, pid: int, how: StartMethod, reason: str, start_s: float, page: RankSide, channel: Channel):
        self.pid = pid
        self._identity = processes.identity_of(pid)
        self.how = how
        self.reason = reason
        self.start_s = start_s
        self.page = page
        self.dropped = 0
        self._channel = channel
        self._is_ready = threading.Event()
        self._is_late = False  # it was not ready when the call began
        self._has_hung_up = False
        self.error = ""  # why the monitor does no work in the store: it is not connected, or does not supervise

    @property
    def advice(self) -> tuple[str, ...]:
        """Return the reason for which the monitor should not have been forked, if it was all the same."""
        return (self.reason,) if self.how == "forked" and self.reason else ()

    def send(self, message: messages.FromRank) -> bool:
        """Send without blocking. A full or closed channel drops the message and counts it."""
        is_sent = self._channel.send(messages.encode(message))
        self.dropped += not is_sent
        return is_sent

    def take(self, record: Record) -> bool:
        """Send a record of the rank's emitter, as its sink."""
        data = messages.encode(messages.Emitted(record))
        if len(data) > self._channel.limit:
            data = messages.encode(messages.Emitted(shortened(record)))
        is_sent = self._channel.send(data)
        self.dropped += not is_sent
        return is_sent

    def is_alive(self, wait: float) -> bool:
        """Listen for at most `wait` seconds. Return True if the monitor still holds its end."""
        try:
            data = self._channel.receive(wait)
        except ChannelClosed:
            self._has_hung_up = True
            return False
        if data is not None:
            self._handle(data)
        return True

    def _handle(self, data: bytes) -> None:
        try:
            message = messages.decode_for_rank(data)
        except DecodeError:
            return  # our monitors never send that; it must not end the listening thread
        match message:
            case messages.Ready(error):
                self.error = error
                self._is_ready.set()
            case messages.ShowStacks(number):
                with contextlib.suppress(Exception):  # the thread that listens goes on
                    collective_calls.note_recorded()
                with contextlib.suppress(Exception):
                    stacks.answer(number)
            case messages.TerminalLine(line):
                with contextlib.suppress(Exception):  # of the user's stream: the thread that listens goes on
                    standard.show(line)
            case (
                messages.Introduce() | messages.Welcome() | messages.Refused()
            ):  # only the launcher's monitors send these
                pass

    def forget(self) -> None:
        """Close a forked child's copy of the parent's channel."""
        self._channel.close()

    def close(self, await_end: Callable[[float], bool], has_completed: bool) -> None:
        """Close the connection. The monitor reads what was sent, stops watching, and ends when no rank needs its store.

        await_end: joins the thread that listens in `is_alive`, and returns True if it has ended. has_completed: all
        ranks have completed the call."""
        self._channel.end()
        deadline = time.monotonic() + LEAVE_LIMIT
        has_stopped = await_end(LEAVE_LIMIT)  # by then it sends no signal to this process
        if not has_stopped:
            self._channel.end(receiving=True)
            await_end(LEAVE_LIMIT)
        self.page.close()
        self._channel.close()
        if has_stopped:
            stacks.disarm()
        if not processes.await_end(self._identity, deadline - time.monotonic()):
            _leaving.append((self._identity, has_completed))

    def abandon(self) -> None:
        """Close the connection without waiting for anything. The next call waits until the monitor has ended."""
        self._channel.hang_up()
        _leaving.append((self._identity, False))

    @property
    def is_working(self) -> bool:
        """Return True if the monitor does its work in the store: it lives, has not failed, and was not stopped by a
        signal or a debugger."""
        state = processes.state(self.pid)
        is_running = state is None or state.state not in ("T", "t")  # None: it is gone, or cannot be read now
        is_missing = bool(self.error) or (self._is_late and not self._is_ready.is_set())
        return is_running and not is_missing and processes.is_alive(self._identity)

    def await_ready(self, limit: float) -> None:
        """Wait until the monitor is connected to the wrapper's store, or hosts it; `error` then says if it cannot.

        Raises: MonitorError."""
        deadline = time.monotonic() + limit
        while not self._is_ready.is_set():
            if self._has_hung_up:
                raise MonitorError(
                    f"monitor process {self.pid} ended before it was ready; its messages go to "
                    "monitor_process_logfile, if that is set"
                )
            if time.monotonic() > deadline:
                raise MonitorError(
                    f"monitor process {self.pid} did not host the wrapper's store within {limit:g} s "
                    "(barrier_timeout). A monitor that is a fresh process imports torch first, perhaps from a slow "
                    "file system: raise barrier_timeout if that may take longer"
                )
            self.is_alive(LISTEN)

    def await_connected(self, limit: float) -> bool:
        """Wait until the monitor is connected to the store, cannot be, or has ended. Another thread listens in
        `is_alive`. Return False if it is still not connected: the rank goes on, and the monitor does no work yet."""
        deadline = time.monotonic() + limit
        while not self._is_ready.is_set() and not self._has_hung_up:
            if time.monotonic() > deadline:
                self._is_late = True
                return False
            self._is_ready.wait(LISTEN)
        return True


def start(wrapper: Wrapper, state: State, is_host: bool, notice: Notice) -> Handle:
    """Start this rank's monitor, which hosts the wrapper's store if `is_host`.

    notice: names the key for the address of a store beside the launcher's own.
    Raises: MonitorError, ConfigurationError."""
    began = time.monotonic()
    with contextlib.ExitStack() as on_error, contextlib.ExitStack() as always:
        try:
            plan = Plan(wrapper, state, is_host, notice)
            check_logfile(plan.logfile)
            page = Page.create()
            always.callback(page.close)
            rank_side = RankSide(page)
            on_error.callback(rank_side.close)
            rank_side.lock_life()
            ours, theirs = pair()
            on_error.callback(ours.close)
            always.callback(theirs.close)
            dump = stacks.arm()
            on_error.callback(stacks.disarm)
            # Opened here, because this process may have ended before its monitor runs.
            rank = processes.Process(plan.rank_pid, start_time=plan.rank_start_time)
            always.callback(rank.close)
            pickled, reason = _plan_to_send(plan)
            if pickled is None:
                pid = _fork(plan, page, theirs, ours, dump, rank)
            else:
                pid = _execute(pickled, page, theirs, dump, rank)
            how: StartMethod = "forked" if pickled is None else "executed"
            handle = Handle(pid, how, reason, time.monotonic() - began, rank_side, ours)
        except OSError as error:
            raise _not_started(error_in_words(error)) from error
        on_error.pop_all()
    return handle


def await_earlier(limit: float) -> None:
    """Wait until the monitors of earlier calls have ended: one of them may hold the port needed next.

    If one is still there after `limit` seconds, and its call was completed, it serves nobody and is killed. If this
    rank left the call, the others may continue in it. Raises: StoreError."""
    deadline = time.monotonic() + limit
    while _leaving:
        identity, has_completed = _leaving[-1]
        if processes.await_end(identity, deadline - time.monotonic()):
            _leaving.pop()
        elif not limit:
            return
        elif not has_completed:
            raise StoreError(
                f"this rank left an earlier call, in which other ranks continue: process {identity[0]} has hosted "
                f"their store for {limit:g} s since (barrier_timeout). Call a wrapped function again when all ranks "
                "have left the earlier call"
            )
        else:
            processes.kill(identity)
            limit = 0.0
            deadline = time.monotonic() + LEAVE_LIMIT


def _plan_to_send(plan: Plan) -> tuple[bytes | None, str]:
    """Return the pickled plan for an executed monitor, None for a forked one, and the reason not to fork, if any.

    Raises: ConfigurationError if the monitor must not be forked and cannot be executed."""
    need = why_not_fork()
    reason = need or why_rather_not_fork()
    if not reason:
        return None, ""
    try:
        return _pickled(plan), reason
    except Exception as error:  # pickle raises nearly anything
        refusal = (
            "the wrapper's store_factory, store_kwargs, rank_assignment or rank_filter cannot be sent to a fresh "
            f"process: {error}. Use functions and classes of a module for them"
        )
        if need:
            raise ConfigurationError(
                f"the monitor has to be a fresh process ({need}), and {refusal}, or call the wrapped function before "
                "starting threads or CUDA"
            ) from error
        return None, f"{reason}; {refusal}"


def _pickled(plan: Plan) -> bytes:
    """Raises: nearly anything."""
    pickled = io.BytesIO()
    pickle.dump(sys.path, pickled)  # a script's folder is on it
    _Pickler(pickled).dump(plan)
    return pickled.getvalue()


def _not_started(reason: str) -> MonitorError:
    return MonitorError(
        f"the monitor process could not be started: {reason}. If this host or container is short of processes, memory "
        "or open files, raise that limit (ulimit -u, pids.max, ulimit -n), or start fewer processes"
    )


def _fork(
    plan: Plan, page: Page, channel: Channel, other_end: Channel, dump: stacks.Dump, rank: processes.Process
) -> int:
    read, write = os.pipe()
    open_ends = [read, write]
    try:
        with processes.job_signals_blocked():  # the monitor inherits the mask, and unblocks them once it ignores them
            between = os.fork()
            if not between:
                _fork_again(plan, page, channel, (other_end.fileno(), read), write, dump, rank)
        os.close(open_ends.pop())
        with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored, or a handler of the program has reaped it
            os.waitpid(between, 0)
        monitor_pid = os.read(read, 32)
    finally:
        close_all(open_ends)
    if not monitor_pid:
        raise _not_started("its second fork failed")
    return int(monitor_pid)


def _fork_again(
    plan: Plan,
    page: Page,
    channel: Channel,
    rank_fds: tuple[int, ...],
    write: int,
    dump: stacks.Dump,
    rank: processes.Process,
) -> NoReturn:
    """Send the monitor's process id to the rank, and end. The child becomes the monitor."""
    code = 1
    try:
        pid = os.fork()
        if pid:
            os.write(write, str(pid).encode())
            os._exit(0)
        for fd in (*rank_fds, write):
            os.close(fd)
        descriptors.release_others((page.fd, channel.fileno(), dump.fd, rank.pidfd))  # as for an executed monitor
        _become_monitor(plan, page, channel, dump, rank)
        code = 0
    except BaseException as error:  # the last chance to print the error before the process ends
        message = f"resilience monitor of rank {plan.initial_rank}: {error_in_words(error)}\n"
        os.write(2, printable(message).encode())
    finally:
        os._exit(code)


def _execute(pickled: bytes, page: Page, channel: Channel, dump: stacks.Dump, rank: processes.Process) -> int:
    fds = (page.fd, channel.fileno(), dump.fd, rank.pidfd)
    # Not a pipe, which would block here if the plan is large and the monitor slow.
    with os.fdopen(os.memfd_create("resilience-plan"), "w+b") as plan_file:
        plan_file.write(pickled)
        plan_file.seek(0)
        read = plan_file.fileno()
        monitor = [sys.executable, "-c", _MONITOR, str(read), *map(str, fds)]
        between = [sys.executable, "-S", "-c", _BETWEEN, *monitor]
        with processes.job_signals_blocked():  # as for a forked monitor
            monitor_pid = subprocess.run(
                between, pass_fds=(read, *fds), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
            ).stdout
    if not monitor_pid:
        raise _not_started("its second fork failed")
    return int(monitor_pid)


class _Pickler(pickle.Pickler):
    """Refuses what another process could not import: what the script itself defines, or a module that it loaded from a
    file by path."""

    def persistent_id(self, value: Any) -> None:
        if not isinstance(value, type | FunctionType):
            return
        if value.__module__ == "__main__":
            raise TypeError(f"{value.__qualname__} is defined in the script itself, not in a module that it imports")
        if not _is_importable(value.__module__):
            raise TypeError(f"{value.__qualname__} is defined in {value.__module__}, which no `import` would find")


def _is_importable(module: str) -> bool:
    """Return True if an import in a process with the same path would load the module that is loaded here."""
    package = module.partition(".")[0]
    loaded = getattr(sys.modules.get(package), "__spec__", None)
    specs = (finder.find_spec(package, None) for finder in sys.meta_path)
    spec = next((spec for spec in specs if spec is not None), None)
    return spec is not None and loaded is not None and spec.origin == loaded.origin


# `-c` and `-m` look for modules in the working directory first, where any name may be that of the program's own file.
# The directory stays the same: the path of a store's file may be relative to it.
_WITHOUT_WORKING_DIRECTORY = """
import sys
sys.path = [path for path in sys.path if path]
"""

# Its one child becomes the monitor, which does not need the pipe to the rank.
_BETWEEN = f"""{_WITHOUT_WORKING_DIRECTORY}
import os
pid = os.fork()
if pid:
    os.write(1, str(pid).encode())
else:
    os.dup2(0, 1)
    os.execv(sys.argv[1], sys.argv[1:])
"""

# The package may be in a folder that only the script has put on its path.
_MONITOR = f"""{_WITHOUT_WORKING_DIRECTORY}
import os, pickle
plan_file = os.fdopen(int(sys.argv[1]), "rb")
sys.path[:] = pickle.load(plan_file)
from resilience.inprocess._runtime.monitor_process import become_executed
become_executed(plan_file, *map(int, sys.argv[2:]))
"""


def _become_monitor(plan: Plan, page: Page, channel: Channel, dump: stacks.Dump, rank: processes.Process) -> None:
    """Run in the monitor's own process until its rank is gone and its end is on record."""
    if os.getsid(0) != os.getpid():
        os.setsid()  # a signal to the rank's group, or Ctrl-C, must not end the monitor too
    processes.ignore_job_signals()
    titles.name(f"res-monitor {plan.initial_rank}")
    titles.show([f"resilience-monitor: Wrapper of rank {plan.initial_rank}"])
    gc.disable()
    # A store server looks up its clients' names in the thread that serves them all: bound the cost.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    _redirect_output(plan.logfile)
    descriptors.raise_limit()  # any rank may become rank 0, whose monitor hosts the stores of the process groups
    monitor: RankMonitor

    def ready(error: str) -> None:
        channel.send(messages.encode(messages.Ready(error)))

    receiver = MonitorStore(
        plan.store_factory,
        plan.store_kwargs,
        plan,
        is_host=plan.is_host,
        notice=plan.notice,
        ready=ready,
        emit=lambda *new: monitor.emit(*new),
        alert=lambda line: channel.send(messages.encode(messages.TerminalLine(line))),
        terminal=plan.terminal,
        has_completed=lambda: monitor.has_completed,
    )
    monitor = CallingRank(MonitorSide(page), channel, rank, receiver, dump, receiver.silences).monitor
    receiver.start()
    monitor.run()
    WRITER.flush()


def check_logfile(logfile: str) -> None:
    """Raise if the monitor's messages cannot be written: it could not start. Raises: ConfigurationError."""
    if not logfile:
        return
    try:
        os.close(_open_logfile(logfile))
    except OSError as error:
        raise ConfigurationError(
            f"monitor_process_logfile {logfile} cannot be written: {error.strerror}; create its folder on each node, "
            "or choose another path",
            option="monitor_process_logfile",
            value=logfile,
        ) from error


def _open_logfile(logfile: str) -> int:
    return os.open(logfile, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _redirect_output(logfile: str) -> None:
    """Release the rank's output, so that its reader sees end-of-file when the rank ends."""
    null = os.open(os.devnull, os.O_RDWR)
    log = _open_logfile(logfile) if logfile else null
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def shortened(record: Record) -> Record:
    """Return the record, shortened so that it fits one message."""
    event = record.event
    if isinstance(event, RankInterrupted):
        return msgspec.structs.replace(record, event=RankInterrupted(messages.shortened(event.record)))
    return record


def become_executed(plan_file: BinaryIO, page_fd: int, channel_fd: int, dump_fd: int, rank_pidfd: int) -> None:
    """Be the monitor in a fresh process. plan_file: at the pickled plan; the rank's module path came before it."""
    channel = Channel(socket.socket(fileno=channel_fd))
    try:
        with plan_file:
            plan: Plan = pickle.load(plan_file)
    except Exception as error:  # of a user's module, which is imported here
        channel.send(messages.encode(messages.Ready(f"it cannot load the wrapper's hooks: {error_in_words(error)}")))
        raise
    rank = processes.Process(plan.rank_pid, rank_pidfd, plan.rank_start_time)
    _become_monitor(plan, Page.attach(page_fd), channel, stacks.Dump(dump_fd), rank)
