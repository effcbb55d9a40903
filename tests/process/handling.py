"""Ranks whose signal handlers raise while they restart."""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from resilience.errors import RestartAbort
from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess.abort import Abort
from resilience.inprocess.finalize import Finalize
from resilience.inprocess.initialize import Initialize
from resilience.inprocess.state import State
from resilience.system import interrupt
from tests.support import signs

CHILD = "child"


class LoseChild(Finalize):
    """In iteration 0, rank 1 ends rank 0's child and goes on when rank 0's handler was called: so long rank 0 waits for
    it, in the middle of the restart."""

    def __call__(self, state: State, exception: BaseException | None) -> State:
        if state.iteration == 0 and state.initial_rank == 1:
            signs.await_file(signs.Path(CHILD), 60.0)
            os.kill(int(signs.Path(CHILD).read_text()), signal.SIGKILL)
            signs.hold("lost", 1)
        return state


def handler_raises(again: bool) -> tuple[int, int]:
    """Rank 0 fails in iteration 0, and its handler of SIGCHLD raises during the restart: once, as torch's does, or at
    each call. Returns: the iteration in which this rank completed, how often its handler was called."""
    rank = int(os.environ["RANK"])
    called = 0

    def raise_once(_: int, frame: FrameType | None) -> None:
        nonlocal called
        called += 1
        signs.let_on(signs.Path.cwd(), "lost")
        if again or called == 1:
            if called > 1:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            raise RuntimeError("a process of mine is lost")

    # Rank 0 runs no hook: what a handler raises in one is raised there.
    lose_child = LoseChild() if rank == 1 else None

    @Wrapper(finalize=lose_child, soft_timeout=timedelta(seconds=10), hard_timeout=timedelta(seconds=90))
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if call.iteration == 0 and rank == 0:
            signal.signal(signal.SIGCHLD, raise_once)
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            signs.Path("child.new").write_text(str(child.pid))
            os.replace("child.new", CHILD)
            raise ValueError("the first fault")
        while call.iteration == 0:
            time.sleep(0.005)
        return call.iteration

    return function(), called


class Preempted(Exception):
    """What a handler raises that a scheduler's signal calls."""


def once(number: int) -> Callable[[], None]:
    """Return C code that sends this process a signal when it is called first. Python then calls the handler in the code
    that has called it."""
    return functools.partial(next, map(os.kill, [os.getpid()], [number]), None)


def handler_raises_after_the_function() -> str:
    """The signal arrives when the function has returned."""

    def preempt(_: int, frame: FrameType | None) -> None:
        raise Preempted

    @Wrapper()
    def function(call: CallWrapper | None = None) -> str:
        assert call is not None
        signal.signal(signal.SIGUSR1, preempt)
        call._release_watcher = once(signal.SIGUSR1)  # type: ignore[method-assign]
        return "completed"

    try:
        return function()
    except Preempted:
        return "preempted"


def handler_raises_after_ctrl_c() -> dict[str, Any]:
    """Ctrl-C ends the function, and the processes of its data loader too, which a handler then tells."""
    calls = 0

    def lost(_: int, frame: FrameType | None) -> None:
        nonlocal calls
        calls += 1
        raise RuntimeError(f"a process of mine is lost (call {calls})")

    @Wrapper()
    def function(call: CallWrapper | None = None) -> None:
        assert call is not None
        signal.signal(signal.SIGUSR1, lost)
        call._release_watcher = once(signal.SIGUSR1)  # type: ignore[method-assign]
        raise KeyboardInterrupt

    try:
        function()
    except BaseException as error:
        return {"raised": type(error).__name__, "notes": getattr(error, "__notes__", [])}
    return {"raised": "", "notes": []}


def handler_gives_its_signal_back() -> int:
    """The signal arrives during the restart. Its handler acts once, as many do."""

    def preempt(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Preempted

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if call.iteration == 0:
            signal.signal(signal.SIGUSR1, preempt)
            call._release_watcher = once(signal.SIGUSR1)  # type: ignore[method-assign]
            raise ValueError("the first fault")
        return call.iteration

    return function()


def _exit(_: int, frame: FrameType | None) -> None:
    sys.exit(143)


def _clean_up_until(number: int, set_handler_in: str) -> None:
    """Wait for the interruption, then be signalled in the middle of cleaning up. The handler of SIGTERM exits."""
    if number == signal.SIGTERM and set_handler_in == "call":
        signal.signal(number, _exit)
    try:
        signs.show("waiting", 1)
        while True:
            time.sleep(0.005)
    finally:
        os.kill(os.getpid(), number)
        time.sleep(60.0)


class BeginSignalled(Initialize):
    """In iteration 0, rank 1 is signalled while it leaves this hook for an interruption."""

    def __init__(self, is_due: bool, number: int) -> None:
        self._is_due = is_due
        self._number = number

    def __call__(self, state: State) -> State:
        if self._is_due and state.iteration == 0 and state.initial_rank == 1:
            _clean_up_until(self._number, "program")
        return state


def signalled_in_cleanup(signal_name: str, set_handler_in: str, place: str) -> tuple[int, int]:
    """Rank 0 fails in iteration 0. It interrupts rank 1, which is signalled while it cleans up in `place`, the function
    or a hook. Returns: the iteration in which this rank completed,
    and the number of ranks in it."""
    number, rank = signal.Signals[signal_name], os.environ["RANK"]
    if number == signal.SIGTERM and set_handler_in == "program":
        signal.signal(number, _exit)

    @Wrapper(
        initialize=BeginSignalled(place == "hook", number),
        soft_timeout=timedelta(seconds=30),
        hard_timeout=timedelta(seconds=90),
    )
    def function(call: CallWrapper | None = None) -> tuple[int, int]:
        assert call is not None
        if call.iteration == 0 and rank == "0":
            signs.await_sign(signs.Path.cwd(), "waiting", 1)
            raise ValueError("the first fault")
        if call.iteration == 0:
            _clean_up_until(number, set_handler_in)
        return call.iteration, int(os.environ["WORLD_SIZE"])

    return function()


def exits_when_interrupted() -> tuple[int, int]:
    """Rank 0 fails in iteration 0. Rank 1 turns the interruption into an exit of its own: it restarts nevertheless."""

    @Wrapper()
    def function(call: CallWrapper | None = None) -> tuple[int, int]:
        assert call is not None
        if call.iteration == 0 and os.environ["RANK"] == "0":
            signs.await_sign(signs.Path.cwd(), "waiting", 1)
            raise ValueError("the first fault")
        try:
            while call.iteration == 0:
                signs.show("waiting", 1)
                time.sleep(0.005)
        except BaseException:
            sys.exit(1)
        return call.iteration, int(os.environ["WORLD_SIZE"])

    return function()


class CutFirst(Abort):
    """Frees the main thread by an error, and is over only when it has left for that: the interruption, which follows
    the hook, comes too late."""

    def __init__(self) -> None:
        self.has_cut = threading.Event()

    def __call__(self, state: State) -> State:
        self.has_cut.set()
        signs.await_true(lambda: not any(interrupter.is_armed for interrupter in interrupt._interrupters))
        return state


def _answer(how: str, wait: Callable[[], None]) -> None:
    """Wait for an error, and make an exit of it."""
    try:
        wait()
    except Exception as error:
        if how == "exit after ctrl-c":
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                sys.exit(1)
        if how == "exit":
            sys.exit(1)
        if how == "abort":
            raise RestartAbort from error
    if how == "exit, later":
        sys.exit(1)
    if how == "abort of its own":
        raise RestartAbort


class AnswerInHook(Initialize):
    """In iteration 0, rank 1 makes an exit of an error in this hook."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self._answer = answer

    def __call__(self, state: State) -> State:
        if state.iteration == 0 and state.initial_rank == 1:
            self._answer()
        return state


def exits_when_cut(how: str, place: str) -> tuple[int, int]:
    """Rank 0 fails in iteration 0. Rank 1 gets an error from the abort, before it is interrupted, and makes an exit of
    it in `place`, the function or a hook. Returns: the iteration in which this rank completed, and the number of ranks
    in it."""
    abort, rank = CutFirst(), os.environ["RANK"]

    def wait() -> None:
        signs.show("waiting", 1)
        assert abort.has_cut.wait(60.0)
        raise ConnectionError("cut")

    initialize = AnswerInHook(lambda: _answer(how, wait)) if place == "hook" else None

    @Wrapper(abort=abort, initialize=initialize)
    def function(call: CallWrapper | None = None) -> tuple[int, int]:
        assert call is not None
        if call.iteration == 0 and rank == "0":
            signs.await_sign(signs.Path.cwd(), "waiting", 1)
            raise ValueError("the first fault")
        if call.iteration == 0 and place == "function":
            _answer(how, wait)
        return call.iteration, call.state.world_size

    return function()


def exits_after_a_lost_peer(end: str, how: str) -> tuple[int, int]:
    """Rank 0 fails, or its process ends, in iteration 0. The others make an exit of what their collective raises, rank
    1 in its own way. Returns: the iteration in which this rank completed, and the number of ranks in it."""

    @Wrapper()
    def function(call: CallWrapper | None = None) -> tuple[int, int]:
        assert call is not None
        if call.iteration == 0:
            dist.init_process_group("gloo")
            dist.barrier()
            if os.environ["RANK"] == "0" and how == "exit after ctrl-c":
                signs.await_sign(Path.cwd(), "inside", 1)
            if os.environ["RANK"] == "0" and end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if os.environ["RANK"] == "0":
                raise ValueError("the first fault")
            own = how if os.environ["RANK"] == "1" else "exit"
            # An interruption would come before the Ctrl-C if this rank is late.
            with call.atomic() if own == "exit after ctrl-c" else contextlib.nullcontext():
                signs.show("inside", int(os.environ["RANK"]))
                _answer(own, dist.barrier)
        return call.iteration, call.state.world_size

    return function()


def _await_strike(call: CallWrapper) -> None:
    """Wait until an interruption has met this place, and let the place go on. Otherwise it has left this function."""
    deadline = time.monotonic() + 60.0
    while call._interrupter._fragile_since is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def interrupted_while_leaving(how: str, set_handler_in: str, limit: float) -> tuple[int, int]:
    """In iteration 0, rank 1 gets a signal, or gives up. Rank 0 then fails: rank 1 is interrupted in the handler of the
    signal or while it cleans up. limit: seconds for which it may then go on. Returns: the iteration in which this rank
    completed, and the number of ranks in it."""
    interrupt.FRAGILE_LIMIT = limit
    place, rank = how.rpartition(" ")[2], os.environ["RANK"]
    calls: list[CallWrapper] = []

    def leave(_: int, frame: FrameType | None) -> None:
        if place == "handler" and calls[0].iteration == 0:
            signs.show("leaving", 1)
            _await_strike(calls[0])
        sys.exit(143)

    def set_handler() -> None:
        signal.signal(signal.SIGTERM, functools.partial(leave))

    if set_handler_in == "program":
        set_handler()

    @Wrapper(soft_timeout=timedelta(seconds=30), hard_timeout=timedelta(seconds=90))
    def function(call: CallWrapper | None = None) -> tuple[int, int]:
        assert call is not None
        calls.append(call)
        if call.iteration == 0 and rank == "0":
            signs.await_sign(signs.Path.cwd(), "leaving", 1)
            raise ValueError("the first fault")
        if call.iteration == 0:
            if set_handler_in == "call":
                set_handler()
            try:
                if how.startswith("abort"):
                    raise RestartAbort
                os.kill(os.getpid(), signal.SIGINT if how.startswith("ctrl-c") else signal.SIGTERM)
                time.sleep(60.0)
            finally:
                if place == "cleanup":
                    signs.show("leaving", 1)
                    _await_strike(call)
        while call.state.world_size > 1:  # until rank 1 has left
            time.sleep(0.005)
        return call.iteration, call.state.world_size

    return function()


def restarts_while_the_caller_handles(error: str) -> tuple[int, int]:
    """Both ranks call the function while they handle an exit. Rank 0 fails in iteration 0. Returns: the iteration in
    which this rank completed, and the number of ranks in it."""

    @Wrapper()
    def function(call: CallWrapper | None = None) -> tuple[int, int]:
        assert call is not None
        if call.iteration == 0 and os.environ["RANK"] == "0":
            signs.await_sign(signs.Path.cwd(), "waiting", 1)
            raise ValueError("the first fault")
        while call.iteration == 0:
            signs.show("waiting", 1)
            time.sleep(0.005)
        return call.iteration, call.state.world_size

    try:
        raise getattr(builtins, error)
    except (SystemExit, KeyboardInterrupt):
        return function()


def gives_its_signal_back_if_it_is_still_its_own() -> tuple[int, bool]:
    """Rank 0 fails in iteration 0, and interrupts rank 1 in a function that has installed a handler. Returns: the
    iteration in which this rank completed, and whether the program's own handler is there again."""

    def of_program(_: int, frame: FrameType | None) -> None:
        pass

    def of_function(_: int, frame: FrameType | None) -> None:
        pass

    signal.signal(signal.SIGTERM, of_program)

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        before = signal.signal(signal.SIGTERM, of_function)
        try:
            if call.iteration == 0 and os.environ["RANK"] == "0":
                signs.await_sign(signs.Path.cwd(), "waiting", 1)
                raise ValueError("the first fault")
            while call.iteration == 0:
                signs.show("waiting", 1)
                time.sleep(0.005)
        finally:
            if signal.getsignal(signal.SIGTERM) is of_function:
                signal.signal(signal.SIGTERM, before)
        return call.iteration

    return function(), signal.getsignal(signal.SIGTERM) is of_program
