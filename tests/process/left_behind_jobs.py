"""What a wrapped call leaves in its process: what the ranks of `test_left_behind` run."""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import gc
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
import torch.distributed as dist

from resilience.errors import ConfigurationError, RestartAbort, StoreError
from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess._runtime import monitor_process, session, supervision
from resilience.inprocess.completion import Completion
from resilience.inprocess.rank_assignment import ShiftRanks
from resilience.inprocess.state import State
from resilience.inprocess.terminate import Terminate
from resilience.monitor.page import RankSide
from resilience.system import private
from resilience.system.interrupt import Interrupter
from resilience.system.signal_handlers import ProgramHandlers
from tests.support import threads

TICKER = "resilience-ticker"
SETTLE_LIMIT = 20.0  # seconds; a monitor that hosts a store serves until the last rank has left


def snapshot(monitors: list[int]) -> dict[str, Any]:
    """Everything of a process that a call could leave behind."""
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": threads.count(),
        "descriptors": sorted(_descriptors()),
        "mappings": sorted(
            line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line
        ),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(),
        "monitors": _alive(monitors),
        "handlers": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
        "signals": [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))],
        "environment": dict(os.environ),
        "hooks": [str(hook) for hook in (sys.excepthook, sys.unraisablehook, threading.excepthook)],
        "traces": [str(trace) for trace in (sys.gettrace(), sys.getprofile(), threading.gettrace())],
        "constructor": str(vars(dist.TCPStore)["__init__"]),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(map(str, gc.callbacks))),
        "atexit": atexit._ncallbacks(),
        "faulthandler": faulthandler.is_enabled(),
    }


def _descriptors() -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            pass  # the one that lists them
    return links


def _alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid)]


def differences(before: dict[str, Any], monitors: list[int]) -> dict[str, Any]:
    """What is not as it was, once it has settled."""
    deadline = time.monotonic() + SETTLE_LIMIT
    while True:
        now = snapshot(monitors)
        left = {name: (before[name], value) for name, value in now.items() if value != before[name]}
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.02)


def settled(tasks: int) -> dict[str, Any]:
    """Wait until the process has no more threads than before the first call, and return what is there then."""
    deadline = time.monotonic() + SETTLE_LIMIT
    while threads.count() > tasks and time.monotonic() < deadline:
        time.sleep(0.02)
    return snapshot([]) | {"tasks": tasks}  # a thread that was joined may be listed for a moment


def ending_of(name: str, rank: int) -> Callable[[CallWrapper], int]:
    def end(call: CallWrapper) -> int:
        if name == "restarts" and call.iteration == 0 and rank == 1:
            raise ValueError("by schedule")
        if name == "raises":
            raise RestartAbort("by schedule")
        if name == "leaves" and call.iteration == 0 and rank == 1:
            raise SystemExit(3)
        return call.iteration

    return end


def own_threads() -> list[str]:
    """Return the names of this package's threads that are alive at this moment."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("resilience-"))


def call_several(endings: list[str], groups: bool) -> tuple[list[str], list[dict[str, Any]], list[list[str]]]:
    """Call a new Wrapper for each ending; answers how each call ended, what was left after it once that had settled,
    and which threads of ours were alive at the moment after the call."""
    rank = int(os.environ["RANK"])
    outcomes: list[str] = []
    left: list[dict[str, Any]] = []
    at_once: list[list[str]] = []
    errors: list[BaseException] = []  # kept: their tracebacks must hold nothing either
    calls: list[CallWrapper] = []
    monitors: list[int] = []

    def once(name: str) -> str:
        class Local(ShiftRanks):
            """Cannot be sent to an executed monitor."""

        end = ending_of(name, rank)

        @Wrapper(rank_assignment=Local())
        def function(call: CallWrapper | None = None) -> int:
            assert call is not None
            calls.append(call)
            monitors.append(call._session._monitor.pid)
            if groups:
                dist.init_process_group("gloo")
                dist.all_reduce(torch.ones(1))
            value = end(call)
            if groups:
                dist.destroy_process_group()
            return value

        try:
            outcome = f"returned {function()}"
        except BaseException as error:
            at_once.append(own_threads())
            errors.append(error)
            return f"raised {type(error).__name__}"
        at_once.append(own_threads())
        return outcome

    tasks = threads.count()
    once("restarts")  # what torch and we load and keep for good
    before = settled(tasks)
    for name in endings:
        outcomes.append(once(name))
        left.append(differences(before, monitors))
    return outcomes, left, at_once


def call_again(calls: int) -> list[dict[str, Any]]:
    """Call one function again and again, as soon as nothing is left of the call before. Answers what was left of each
    but the first."""
    monitors: list[int] = []

    @Wrapper()
    def function(call: CallWrapper | None = None) -> None:
        assert call is not None
        monitors.append(call._session._monitor.pid)
        if call.iteration == 0 and os.environ["RANK"] == "1":
            raise ValueError("by schedule")

    tasks = threads.count()
    function()  # what torch and we load and keep for good
    before = settled(tasks)
    left = []
    for _ in range(calls - 1):
        function()
        left.append(differences(before, monitors))
    return left


def call_once(initialised: bool) -> tuple[str, dict[str, Any]]:
    """Call a Wrapper for the first time in this process, after the program built groups of its own if `initialised`.
    Answers the hook's name after the call and what was left of what no library keeps for itself."""

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        monitors.append(call._session._monitor.pid)
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if call.iteration == 0:
            raise ValueError("by schedule")
        dist.destroy_process_group()
        return call.iteration

    monitors: list[int] = []
    if initialised:
        dist.init_process_group("gloo")
        dist.destroy_process_group()
    tasks = threads.count()
    first = threading.Thread(target=int)
    first.start()  # with which glibc takes a signal for itself
    first.join()
    before = snapshot([]) | {"tasks": tasks}  # a thread that was joined may be listed for a moment
    function()
    # "atexit" and "gc": torch and the modules that a first call imports register functions there, for good
    left = differences(before, monitors)
    return sys.excepthook.__name__, {name: both for name, both in left.items() if name not in ("atexit", "gc")}


def call_and_lose_children(how: str) -> tuple[int, dict[str, Any]]:
    """Call a Wrapper in a program whose ended children cannot be waited for. Answers the value and what was left."""

    def reap_all(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        monitors.append(call._session._monitor.pid)
        return call.iteration

    monitors: list[int] = []
    tasks = threads.count()
    function()  # what torch and we load and keep for good
    signal.signal(signal.SIGCHLD, signal.SIG_IGN if how == "ignored" else reap_all)
    before = settled(tasks)
    return function(), differences(before, monitors)


def use_up_descriptors() -> list[int]:
    """Use up all file descriptors of this process. Return them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A child of the tests' own process may have more open already; at least eight are used up here.
    limit = max(256, len(os.listdir("/proc/self/fd")) + 8)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, most), most))
    files: list[int] = []
    while True:
        try:
            files.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return files


def call_and_lose_sight_of_monitor() -> int:
    """Return a value from a call whose process cannot open its monitor at the end."""

    def open_none(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        os.pidfd_open = open_none
        return 7

    return function()


def fork_and_leave(ending: str) -> tuple[Any, Any]:
    """Fork inside the function; the child leaves the call. Answers the parent's value and what the child got."""
    told = Path(f"child-{os.environ['RANK']}")
    rank = os.getpid()

    @Wrapper()
    def function(call: CallWrapper | None = None) -> str:
        assert call is not None
        child = os.fork()
        if child == 0:
            if ending == "raises":
                raise ValueError("in the child")
            return "child"
        os.waitpid(child, 0)  # while this call goes on
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        return f"parent {call.iteration}"

    try:
        value = function()
    except ValueError as error:
        value = f"raised {error}"
    if os.getpid() != rank:
        told.write_text(f"{value}, RANK={os.environ['RANK']}, {threading.active_count()} thread")
        os._exit(0)
    return value, told.read_text()


def fork_after_the_goodbye() -> tuple[str, str]:
    """Fork in the completion hook, which runs after the goodbye; the child leaves the call. Answers the parent's value
    and whether the child spoke to the store as its parent."""
    told = Path(f"child-{os.environ['RANK']}")
    rank, departures = os.getpid(), []

    class Fork(Completion):
        def __call__(self, state: State) -> State:
            child = os.fork()
            if child:
                os.waitpid(child, 0)
                return state
            sys.setprofile(lambda frame, event, _: note(frame, event))
            raise ValueError("in the child")

    def note(frame: FrameType, event: str) -> None:
        if event == "call" and frame.f_code is supervision.depart.__code__:
            departures.append(frame.f_code.co_name)

    @Wrapper(completion=Fork())
    def function(call: CallWrapper | None = None) -> str:
        assert call is not None
        return f"parent {call.iteration}"

    try:
        value = function()
    except BaseException as error:
        value = type(error).__name__
    if os.getpid() != rank:
        sys.setprofile(None)
        told.write_text(f"{value}, spoke {len(departures)} times")
        os._exit(0)
    return value, told.read_text()


def call_interrupted_at_each_line_of_its_start(stride: int) -> tuple[int, list[tuple[str, dict[str, Any]]]]:
    """Send SIGINT at every stride-th line between the call and its function. Answers the number of interrupted calls
    and what was left, by line."""

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        sys.settrace(None)
        assert call is not None
        monitors.append(call._session._monitor.pid)
        return call.iteration

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal passed, place
        code = frame.f_code
        if os.getpid() != pid or code.co_filename not in files:
            return None
        if event == "line":
            passed += 1
            if passed == strike:
                sys.settrace(None)
                place = f"{Path(code.co_filename).name}:{frame.f_lineno}"
                os.kill(pid, signal.SIGINT)
        return trace

    files = {module.__file__ for module in (monitor_process, session)}
    monitors: list[int] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    tasks = threads.count()
    function()  # what torch and we load and keep for good
    before = settled(tasks)
    pid, strike, calls = os.getpid(), 1, 0
    found: list[tuple[str, dict[str, Any]]] = []
    while True:
        passed, place = 0, ""
        sys.settrace(trace)
        with contextlib.suppress(KeyboardInterrupt):
            function()
        sys.settrace(None)
        if not place:
            break
        calls, strike = calls + 1, strike + stride
        gc.collect()
        if left := differences(before, []):
            found.append((place, left))
            before = snapshot([])
    if left := differences(before, _monitors_of_this_job()):
        found.append(("after all", left))
    return calls, found


def calls_short_of_descriptors(is_forked: bool) -> list[tuple[str, list[str]]]:
    """Call a function while this process can open 0, 1, 2, … more files, until they suffice for its monitor to start.
    Answers how each call ended, and which files and mappings it left."""
    if not is_forked:
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    @Wrapper()
    def function() -> str:
        return "done"

    def start(*arguments: Any) -> monitor_process.Handle:
        handle = original(*arguments)
        release()
        return handle

    def release() -> None:
        while opened:
            os.close(opened.pop())

    tasks = threads.count()
    function()  # what torch and we load and keep for good
    before = settled(tasks)
    original, session.start = session.start, start
    opened: list[int] = []
    endings: list[tuple[str, list[str]]] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    while not endings or endings[-1][0] != "done":
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 32, hard))
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.dup(0))
        for _ in endings:
            os.close(opened.pop())
        try:
            ending = function()
        except Exception as error:
            ending = f"{type(error).__name__}: {error}"
        release()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        now = snapshot([])
        left = [each for name in ("descriptors", "mappings") for each in now[name] if each not in before[name]]
        endings.append((ending, left))
    return endings


def call_interrupted_as_its_ticker_starts(has_begun: bool) -> tuple[str, list[str]]:
    """Send SIGINT in the start of the ticker. Answers how the call ended, and which thread waited for the monitor or
    still ran when the call's page was closed.

    has_begun: the ticker runs by then; else it begins as the page is closed."""
    late: list[threading.Thread] = []
    beside: list[str] = []
    is_closing = threading.Event()

    @Wrapper()
    def function() -> str:
        return "done"

    def start(thread: threading.Thread) -> None:
        if thread.name == TICKER and has_begun:
            original_start(thread)
        elif thread.name == TICKER:
            late.append(thread)
        if thread.name == TICKER:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            original_start(thread)

    def close(page: RankSide) -> None:
        is_closing.set()
        beside.extend(thread.name for thread in threading.enumerate() if thread.name == TICKER)
        for thread in late:
            original_start(thread)
            thread.join()
        original_close(page)

    def is_alive(handle: monitor_process.Handle, wait: float) -> bool:
        if is_closing.is_set():
            beside.append(threading.current_thread().name)
        return original_is_alive(handle, wait)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    original_start, original_close, original_is_alive = (
        threading.Thread.start,
        RankSide.close,
        monitor_process.Handle.is_alive,
    )
    threading.Thread.start = start  # type: ignore[method-assign]
    RankSide.close = close  # type: ignore[method-assign]
    monitor_process.Handle.is_alive = is_alive  # type: ignore[method-assign]
    try:
        ending = function()
    except KeyboardInterrupt:
        ending = "interrupted"
    return ending, beside


def call_interrupted_where_it_takes_signals() -> tuple[str, dict[str, Any]]:
    """Send SIGINT while a call takes over the program's signals. Answers how it ended and what was left."""

    @Wrapper()
    def function() -> str:
        return "done"

    def interrupted(*args: Any) -> None:
        ProgramHandlers.guard = guard  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGINT)
        guard(*args)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    tasks = threads.count()
    function()  # what torch and we load and keep for good
    before, guard = settled(tasks), ProgramHandlers.guard
    ProgramHandlers.guard = interrupted  # type: ignore[method-assign, assignment]
    try:
        ending = function()
    except KeyboardInterrupt:
        ending = "interrupted"
    return ending, differences(before, [])


def call_interrupted_at_its_end_in(owner: str, name: str) -> tuple[str, dict[str, Any]]:
    """Send SIGINT when the end of a call gets to this method. Answers how it ended and what was left."""
    kind = {"Session": session.Session, "ProgramHandlers": ProgramHandlers}[owner]

    @Wrapper()
    def function() -> str:
        return "done"

    def interrupted(self: Any) -> None:
        setattr(kind, name, original)
        os.kill(os.getpid(), signal.SIGINT)
        original(self)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    signal.signal(signal.SIGUSR1, lambda *_: None)  # one to guard
    tasks = threads.count()
    function()  # what torch and we load and keep for good
    before, original = settled(tasks), getattr(kind, name)
    setattr(kind, name, interrupted)
    try:
        ending = function()
    except KeyboardInterrupt:
        ending = "interrupted"
    return ending, differences(before, [])


def call_interrupted_twice_while_it_leaves() -> tuple[str, int]:
    """Send SIGINT each time that rank 1 is about to note that it has left. Answers how the call ended and how many
    monitors still watch this process."""
    monitors: list[psutil.Process] = []

    @Wrapper()
    def function(call: CallWrapper | None = None) -> str:
        assert call is not None
        monitors.append(psutil.Process(call._session._monitor.pid))
        return "done"

    def interrupted(self: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        original(self)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    original = session.Session.leave
    if os.environ["RANK"] == "1":
        session.Session.leave = interrupted  # type: ignore[method-assign]
    try:
        ending = function()
    except KeyboardInterrupt:
        ending = "interrupted"
    _, watching = psutil.wait_procs(monitors, SETTLE_LIMIT)
    return ending, len(watching)


def _monitors_of_this_job() -> list[int]:
    found = []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            if process.info["name"].startswith("res-monitor") and process.cwd() == os.getcwd():
                found.append(process.pid)
    return found


class Slow(Terminate):
    def __call__(self, state: State) -> State:
        raise AssertionError("the store does not know yet that this rank has left: the others would wait for this hook")


def call_that_cannot_take_signals() -> str:
    """No signal is free on rank 1. Answers what the call returned or raised."""

    def install(interrupter: Interrupter) -> None:
        raise ConfigurationError("no signal is free")

    if os.environ["RANK"] == "1":
        Interrupter.install = install  # type: ignore[method-assign]

    @Wrapper(terminate=Slow(), rank_assignment=ShiftRanks())
    def function() -> str:
        return "done"

    try:
        return function()
    except Exception as error:
        return type(error).__name__


def call_often(temporary: str, calls: int) -> None:
    """Call the function again and again. temporary: the folder of temporary files of ranks and monitors."""
    tempfile.tempdir = private.MEMORY = temporary

    @Wrapper()
    def function() -> str:
        return "done"

    for _ in range(calls):
        function()


def call_interrupted_at_its_end() -> tuple[str, str, list[str]]:
    """Send SIGINT while a call closes what it has opened. Answers how it ended, what the next call returned, and which
    threads were left after that."""
    from resilience.monitor import client

    @Wrapper()
    def function() -> str:
        return "done"

    def interrupted() -> None:
        client.deactivate = deactivate
        os.kill(os.getpid(), signal.SIGINT)
        deactivate()

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    deactivate, client.deactivate = client.deactivate, interrupted
    try:
        ending = function()
    except KeyboardInterrupt:
        ending = "interrupted"
    following = function()
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    for thread in others:  # that of the first call may just be ending
        thread.join(SETTLE_LIMIT)
    return ending, following, [thread.name for thread in others if thread.is_alive()]


def call_again_while_the_others_continue() -> str:
    """Rank 0, whose monitor hosts the store, leaves; the others go on until it has tried to call the function again."""
    rank, told = os.environ["RANK"], Path("tried")

    @Wrapper(
        soft_timeout=timedelta(seconds=10),
        hard_timeout=timedelta(seconds=12),
        heartbeat_timeout=timedelta(seconds=12),
        barrier_timeout=timedelta(seconds=15),
    )
    def function(call: CallWrapper | None = None) -> str:
        assert call is not None
        if rank == "0" and call.iteration == 0:
            raise SystemExit(3)
        while call.iteration and not told.exists():
            time.sleep(0.02)
        dist.init_process_group("gloo")  # by the store that the monitor of rank 0 hosts
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        return f"completed {call.iteration}"

    try:
        return function()
    except SystemExit:
        pass
    try:
        return function()
    except StoreError as error:
        return str(error)
    finally:
        told.touch()
