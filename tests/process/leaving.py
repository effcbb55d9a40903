"""What ranks run that leave a call, and are interrupted once more at each point of their way out.

All in one process: rank 1 leaves call after call, each time interrupted one point later than the last time, and
catches what comes out of the call. Rank 0 takes part in every call and has to complete it, alone if need be."""

from __future__ import annotations

import dis
import functools
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import resilience
from resilience.core import restart
from resilience.errors import BarrierTimeout, RankDiscarded
from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess._runtime import monitor_store, operations
from resilience.inprocess.finalize import Finalize
from resilience.inprocess.health_check import HealthCheck
from resilience.inprocess.initialize import Initialize
from resilience.inprocess.rank_assignment import RankAssignment, ShiftRanks
from resilience.inprocess.state import State
from resilience.system import processes, store
from tests.support import signs

PACKAGE = str(Path(resilience.__file__).parent)
LEAVER = "1"
KINDS = (
    "fatal",
    "signalled",
    "waiting",
    "departing",
    "initialize",
    "finalize",
    "health_check",
    "discarded",
    "completed",
)
"""Why rank 1 leaves: an exception in the function; a signal while it cleans up after rank 0 has failed; an exception in
the wait for completion, in the departure of a completed call, or in a hook; the rank assignment; or nothing, and it
completes."""


class First(BaseException):
    """Makes a rank leave."""


class Second(BaseException):
    """Comes while it leaves, as from a signal handler."""


class Tripwire:
    """Raises at one point of what the main thread does after `arm`.

    at: the number of the point, from 1; 0: nothing is raised. what: "operations", the beginning and the end of each
    store operation; "operations, again": at that point and at each one after it; "lines": each line of the package,
    once. comes: what brings it, nothing or a signal."""

    def __init__(self, what: str, at: int, comes: signal.Signals | None = None) -> None:
        self.count = 0
        self.struck_at: float | None = None  # on the host's monotonic clock, the first time
        self._what = what
        self._at = at
        self._comes = comes

    def arm(self) -> None:
        if self._what == "lines":
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                frame.f_trace = self._trace
                frame = frame.f_back
            sys.settrace(self._trace)
        else:
            store.execute = monitor_store.execute = operations.execute = self._execute

    def disarm(self) -> None:
        sys.settrace(None)
        store.execute = monitor_store.execute = operations.execute = EXECUTE

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and frame.f_lasti not in _exits_of_with(frame.f_code):
            self._pass()
        return self._trace

    def _execute(self, *arguments: Any, **named: Any) -> Any:
        self._pass()
        answer = EXECUTE(*arguments, **named)
        self._pass()
        return answer

    def _pass(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self.count += 1
        if self.count == self._at or (0 < self._at < self.count and self._what.endswith("again")):
            self.struck_at = self.struck_at or time.monotonic()
            if self._comes is None:
                raise Second
            os.kill(os.getpid(), self._comes)


EXECUTE = store.execute


@functools.cache
def _exits_of_with(code: CodeType) -> frozenset[int]:
    """Where a `with` calls `__exit__(None, None, None)`: a line event of its own, but no place where CPython lets a
    signal handler in. Raised there, an exception would leave a lock held."""
    steps = list(dis.get_instructions(code))
    return frozenset(
        first.offset
        for first, *more, call in zip(steps, steps[1:], steps[2:], steps[3:], strict=False)
        if [step.argval for step in (first, *more)] == [None] * 3
        and {step.opname for step in (first, *more)} == {"LOAD_CONST"}
        and call.opname in ("PRECALL", "CALL")
    )


_wire: Tripwire
_kind: str


def wait_in_vain(options: dict[str, float]) -> tuple[str, float]:
    """Rank 0 fails while rank 1 is stopped. Answers the error of the call, and for how many seconds rank 0 was ready to
    wait for the agreement on the next world."""
    waits = []

    def execute(operation: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(operation, restart.Await) and operation.key == restart.Keys(0).frozen:
            waits.append(operation.limit)
        return EXECUTE(operation, *arguments, **named)

    @Wrapper(**{name: timedelta(seconds=value) for name, value in options.items()})
    def function() -> None:
        signs.hold("stop", int(os.environ["RANK"]))
        raise ValueError("by schedule")

    store.execute = execute
    try:
        function()
    except BarrierTimeout as error:
        return str(error), sum(waits)
    finally:
        store.execute = EXECUTE
    raise AssertionError("the other rank took part")


def _due(kind: str) -> bool:
    return os.environ.get("INITIAL") == LEAVER and kind == _kind


def _leave_now(*_: Any) -> Any:
    _wire.arm()
    raise First


class Begin(Initialize):
    def __call__(self, state: State) -> State:
        if _due("initialize"):
            _leave_now()
        return state


class Finish(Finalize):
    def __call__(self, state: State, exception: Exception | None) -> Any:
        if _due("finalize"):
            _wire.arm()
            raise ValueError("cannot finalize")
        return state, exception


class Check(HealthCheck):
    def __call__(self, state: State, exception: Exception | None) -> Any:
        if _due("health_check") and exception is not None:
            _wire.arm()
            raise ValueError("not healthy")
        return state, exception


class WithoutLeaver(RankAssignment):
    """Initial rank 1 gets no seat after a restart."""

    def __call__(self, state: State, terminated: set[int]) -> tuple[State, set[int]]:
        if state.status.name != "INITIALIZED" and state.world_size == 2:
            if str(state.initial_rank) == LEAVER:
                _wire.arm()
                raise RankDiscarded("by assignment")
            state.world_size = 1
            return state, set()
        return ShiftRanks()(state, terminated)


def leave_at_each(kind: str, what: str, stride: int = 1, first: int = 1) -> Any:
    """Return the number of points and what each call returned or raised. Of each call in which rank 1 was interrupted
    on its way out also return the duration in seconds, and on rank 1 the number of the call and the moment of its first
    interruption, unless the call did not come to that point."""
    global _wire, _kind
    _kind = "none"
    _wire = Tripwire(what, 0)
    os.environ["INITIAL"] = os.environ["RANK"]
    is_leaver = os.environ["RANK"] == LEAVER

    @Wrapper(
        initialize=Begin(),
        finalize=Finish(),
        health_check=Check(),
        rank_assignment=WithoutLeaver() if kind == "discarded" else ShiftRanks(),
        soft_timeout=timedelta(seconds=30),
        hard_timeout=timedelta(seconds=40),
        barrier_timeout=timedelta(seconds=60),
        completion_timeout=timedelta(seconds=60),
    )
    def function(leaves: bool, call: CallWrapper | None = None) -> str:
        assert call is not None
        if is_leaver and leaves:
            return _leave(kind, call)
        if leaves and kind == "discarded" and call.iteration == 0:
            raise ValueError("all restart")
        if leaves and kind == "signalled" and call.state.world_size == 2:  # again if rank 1 was not in its function
            raise ValueError("all restart")
        while leaves and kind not in ("completed", "departing") and call.iteration == 0:
            time.sleep(0.005)
        if not leaves and is_leaver:
            Path("points").write_text(str(_points))
        return "done"

    _points = 0
    got: list[str] = []
    durations: list[float] = []
    struck: list[tuple[int, float]] = []

    def call_once(leaves: bool, at: int) -> int:
        global _wire, _kind
        _wire, _kind = Tripwire(what, at), kind if leaves else "none"
        began = time.monotonic()
        try:
            got.append(str(function(leaves)))
        except BaseException as error:  # what comes out is what is looked at
            if not is_leaver:
                raise
            got.append(type(error).__name__)
        finally:
            _wire.disarm()
            if at > 0:
                durations.append(time.monotonic() - began)
            if _wire.struck_at is not None:
                struck.append((len(got) - 1, _wire.struck_at))
        return _wire.count

    _points = call_once(True, 0)
    call_once(False, 0)
    points = int(Path("points").read_text())
    for at in range(first, points + 1, stride):
        call_once(True, at)
    return points, got, durations, struck


def _leave(kind: str, call: Any) -> str:
    if kind == "fatal":
        _leave_now()
    if kind in ("finalize", "health_check"):
        raise ValueError("all restart")
    if kind in ("waiting", "departing"):
        setattr(call, {"waiting": "_await_decision", "departing": "_depart"}[kind], _leave_now)
        return "done"
    if kind == "completed":
        _wire.arm()
        return "done"
    signal.signal(signal.SIGUSR1, _leave_now)
    try:
        while True:  # rank 0 ends it
            time.sleep(0.005)
    finally:
        if kind == "signalled":
            signal.raise_signal(signal.SIGUSR1)


def end_at(at: int, comes: str) -> str:
    """Rank 1 waits for completion when a signal comes, and the same signal at each store operation from the given
    one on of its way out; its process ends. Rank 0 goes on."""
    number = signal.Signals[comes]
    is_leaver = os.environ["RANK"] == LEAVER
    wire = Tripwire("operations, again", at, number)

    def raise_second(number: int, frame: FrameType | None) -> None:
        raise Second

    def interrupted(*_: Any) -> None:
        wire.arm()
        os.kill(os.getpid(), number)

    @Wrapper(barrier_timeout=timedelta(seconds=100), completion_timeout=timedelta(seconds=60))
    def function(call: CallWrapper | None = None) -> str:
        assert call is not None
        if is_leaver:
            signal.signal(number, raise_second)
            call._await_decision = interrupted  # type: ignore[assignment, method-assign]
        while call.iteration == 0 and not is_leaver:
            time.sleep(0.005)
        return "done"

    return function()


def signalled_as_soon_as_forked() -> str:
    """Every signal that is meant for a job reaches the monitor before it has left the rank's process group."""
    real = os.setsid

    def setsid() -> None:
        for number in processes.MEANT_FOR_A_JOB:
            os.kill(os.getpid(), number)
        real()

    os.setsid = setsid

    @Wrapper()
    def function() -> str:
        return "done"

    return function()
