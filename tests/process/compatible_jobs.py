"""Code as it is written for the compatible API: what the ranks of `test_compatible_semantics` run."""

from __future__ import annotations

import copy
import logging
import os
import signal
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import resilience.inprocess as inprocess
from resilience.errors import RankShouldRestart
from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess.state import State, Status
from resilience.inprocess.store import FileStore, StoreMixin
from tests.support import signs


class Odd(inprocess.finalize.Finalize, inprocess.health_check.HealthCheck):
    """Returns what nobody expects."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def __call__(self, state: State, exc: Exception | None) -> Any:
        return self.returned


class Forgetful(inprocess.initialize.Initialize):
    """Forgets to return the state."""

    def __call__(self, state: State) -> Any:
        state.status = state.status


class Wordless(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class FailsOnce(inprocess.initialize.Initialize):
    """Raises on rank 1 before the first start."""

    def __call__(self, state: State) -> State:
        if state.iteration == 0 and state.rank == 1:
            raise Wordless
        return state


class Pairs(inprocess.initialize.Initialize):
    """Returns what other hooks return."""

    def __call__(self, state: State) -> Any:
        return state, None


class Noting(inprocess.health_check.HealthCheck):
    """Keeps the cause of each call after a fault."""

    def __init__(self) -> None:
        self.causes: list[str] = []

    def __call__(self, state: State, exc: Exception | None) -> tuple[State, Exception | None]:
        if state.iteration or exc is not None:
            self.causes.append(repr(exc))
        return state, exc


def fail_once(call: CallWrapper, error: BaseException) -> int:
    if call.iteration == 0 and os.environ["RANK"] == "1":
        raise error
    return call.iteration


def return_anything_from_hooks() -> int:
    @Wrapper(finalize=Odd(KeyError("returned by finalize")), health_check=Odd(5))
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        return fail_once(call, ValueError("by schedule"))

    return function()


def forget_the_state() -> tuple[int, list[str]]:
    @Wrapper(initialize=Forgetful())
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        return fail_once(call, ValueError("by schedule"))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        iteration = function()
    return iteration, [f"{each.category.__name__}: {each.message}" for each in caught if "initialize" in str(each)]


def fail_without_words() -> int:
    @Wrapper(initialize=FailsOnce())
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        return call.iteration

    return function()


def return_a_pair() -> int:
    @Wrapper(initialize=Pairs())
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        return call.iteration

    return function()


def ask_for_a_restart(has_cause: bool) -> tuple[int, list[str]]:
    """Answers the last iteration, and the causes that the health check got after the fault."""
    check = Noting()

    @Wrapper(health_check=check)
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        error = RankShouldRestart("this rank wants it")
        error.__cause__ = OSError("the disk") if has_cause else None
        return fail_once(call, error)

    return function(), check.causes[:1]


def break_the_store_factory() -> None:
    def factory() -> Any:
        raise LookupError("no store today")

    @Wrapper(store_factory=factory)
    def function() -> None: ...

    function()


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.name, record.levelname, record.getMessage()))


def log_restarts(configured: bool) -> list[tuple[str, str, str]]:
    """Fail twice; answers what a handler of the root logger gets of `resilience`."""
    kept = Kept()
    if configured:
        logging.getLogger().addHandler(kept)

    @Wrapper()
    def function(call: CallWrapper | None = None) -> None:
        assert call is not None
        rank = int(os.environ["RANK"])
        signs.show(f"entered-{call.iteration}", rank)
        if rank == call.iteration:  # a rank that has not entered yet would have one restart instead of two
            signs.await_sign(Path.cwd(), f"entered-{call.iteration}", 1 - rank)
            raise ValueError(f"broken in {call.iteration}")

    function()
    return [line for line in kept.lines if line[0] == "resilience"]


ORDER: list[str] = []


class Ordered(
    inprocess.initialize.Initialize,
    inprocess.finalize.Finalize,
    inprocess.health_check.HealthCheck,
    inprocess.abort.Abort,
    inprocess.rank_assignment.RankAssignment,
    inprocess.rank_filter.RankFilter,
):
    """Notes when it is called, and with which cause."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, state: State, *more: Any) -> Any:
        given = f"({more[0]!r})" if more else ""
        status = state.status.name.lower()
        ORDER.append(f"{self.name}{given} RANK={os.environ['RANK']}/{os.environ['WORLD_SIZE']} {status}")
        return (state, *more) if more else state


def note_the_order_of_hooks() -> list[str]:
    @Wrapper(
        initialize=Ordered("initialize"),
        abort=Ordered("abort"),
        finalize=Ordered("finalize"),
        health_check=Ordered("health_check"),
        rank_assignment=Ordered("rank_assignment"),
        rank_filter=Ordered("rank_filter"),
    )
    def function(call: CallWrapper | None = None) -> None:
        assert call is not None
        ORDER.append("function")
        assert call.state.rank == int(os.environ["RANK"])
        assert call.state.iteration == call.iteration
        assert call.store is call.state.store.base_store
        signs.show("entered", int(os.environ["RANK"]))
        for rank in range(2):  # else a rank may fail before the other has come as far
            signs.await_sign(Path.cwd(), "entered", rank)
        fail_once(call, ValueError("by schedule"))

    before = dict(os.environ)
    function()
    assert dict(os.environ) == before
    return ORDER


class Assigned(inprocess.rank_assignment.RankAssignment):
    """Does after a fault what it is told to do with rank 1."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self, state: State, terminated_ranks: set[int]) -> tuple[State, set[int]]:
        if self.what == "discard" and state.status is inprocess.state.Status.ABORTING:
            return inprocess.rank_assignment.ShiftRanks()(state, terminated_ranks | {1})
        return state, terminated_ranks


def assign_after_a_fault(what: str) -> int:
    @Wrapper(rank_assignment=Assigned(what))
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if what == "leave over" and call.iteration == 0 and os.environ["RANK"] == "1":
            raise SystemExit(3)
        return fail_once(call, ValueError("by schedule"))

    return function()


def refused(where: str) -> str:
    """Call a wrapped function where that cannot work; answers why it was refused."""

    @Wrapper()
    def function() -> None: ...

    said: list[str] = []

    def attempt() -> None:
        try:
            function()
        except ValueError as error:
            said.append(str(error))

    if where == "thread":
        thread = threading.Thread(target=attempt, name="mine")
        thread.start()
        thread.join()
    else:
        dist.init_process_group("gloo")
        attempt()
        dist.destroy_process_group()
    return said[0]


class AtEnd(inprocess.completion.Completion, inprocess.terminate.Terminate):
    """Notes that it was called, and raises."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, state: State) -> State:
        ORDER.append(f"{self.name} in iteration {state.iteration}")
        raise LookupError(self.name)


def end_with_hooks() -> list[str]:
    """Rank 1 leaves and the other one completes; returns what the caller of each got, and the hooks that ran."""

    @Wrapper(completion=AtEnd("completion"), terminate=AtEnd("terminate"))
    def function(call: CallWrapper | None = None) -> str:
        assert call is not None
        fail_once(call, SystemExit(3))
        return "completed"

    try:
        got = function()
    except LookupError as error:
        got = f"{error!r} after {error.__context__!r}"
    return [got, *ORDER]


class HangsAtEnd(inprocess.completion.Completion, inprocess.terminate.Terminate):
    """Returns on rank 0 only."""

    def __call__(self, state: State) -> State:
        while state.initial_rank == 1:
            time.sleep(1.0)
        return state


def hang_at_end(hook: str) -> str:
    """Rank 1 completes or leaves, and hangs in the hook for that."""
    hard, soft = timedelta(seconds=9), timedelta(seconds=6)

    @Wrapper(**{hook: HangsAtEnd()}, soft_timeout=soft, hard_timeout=hard)  # type: ignore[arg-type]
    def function(call: CallWrapper | None = None) -> str:
        assert call is not None
        if hook == "terminate":
            fail_once(call, SystemExit(3))
        return "completed"

    return function()


class BrokenAbort(inprocess.abort.Abort):
    def __call__(self, state: State) -> State:
        raise OSError("the abort is broken")


def restart_with_a_broken_abort() -> list[str]:
    """Return where each iteration has told its groups to meet."""
    places: list[str] = []

    @Wrapper(abort=inprocess.Compose(BrokenAbort(), inprocess.abort.AbortTorchDistributed()))
    def function(call: CallWrapper | None = None) -> list[str]:
        assert call is not None
        places.append(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
        dist.init_process_group("gloo")
        fail_once(call, ValueError("by schedule"))
        return places

    return function()


def ping_and_return_long_before_the_other() -> int:
    @Wrapper(soft_timeout=timedelta(seconds=4), hard_timeout=timedelta(seconds=6))
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if os.environ["RANK"] == "0":
            call.ping()
        else:
            returns_at = time.monotonic() + 9
            while time.monotonic() < returns_at:
                time.sleep(0.05)
        return call.iteration

    return function()


class EndsWithRank0(dist.Store, StoreMixin):
    """A store of the user's own, which says that it ends with the process of rank 0. Rank 1 leaves the call only when
    rank 0 waits for that, or has left. Rank 0 shows this."""

    critical_ranks = (0,)

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = FileStore(path)

    def set(self, key: str, value: str) -> None:
        if key.endswith("/exit/0/1"):
            signs.await_sign(Path.cwd(), "waits or has left", 0)
            signs.show("leaves", 1)
        self._file.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]
        if keys[0].endswith("/exit/done"):
            signs.show("waits or has left", 0)
        self._file.wait(keys, timeout)

    def get(self, key: str) -> bytes:
        return self._file.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._file.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._file.check(keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._file.compare_set(key, expected_value, desired_value)


def leave_at_last(path: str) -> bool:
    """Return whether rank 1 had left the call before this rank did."""

    @Wrapper(store_factory=EndsWithRank0, store_kwargs={"path": path})
    def function() -> None: ...

    function()
    if os.environ["RANK"] == "0":
        signs.show("waits or has left", 0)
    return Path("leaves-1.sign").exists()


class NotedAbort(inprocess.abort.Abort):
    def __call__(self, state: State) -> State:
        ORDER.append("abort")
        return state


def finish_the_atomic_section() -> list[str]:
    """Rank 1 raises while rank 0 is in an atomic section; return what rank 0 did, in order."""

    @Wrapper(abort=NotedAbort())
    def function(call: CallWrapper | None = None) -> list[str]:
        assert call is not None
        if call.iteration:
            return ORDER
        signs.await_sign(Path.cwd(), "in the section", 0) if os.environ["RANK"] == "1" else None
        fail_once(call, ValueError("by schedule"))
        try:
            with call.atomic():
                signs.hold("in the section", 0)
                ORDER.append("the section ends")
            while True:
                time.sleep(0.01)
        except BaseException as error:
            ORDER.append(type(error).__name__)
            raise

    return function()


class Changes(
    inprocess.initialize.Initialize,
    inprocess.finalize.Finalize,
    inprocess.health_check.HealthCheck,
    inprocess.abort.Abort,
    inprocess.rank_assignment.RankAssignment,
    inprocess.rank_filter.RankFilter,
):
    """Notes its name in the state that it was given, or in a copy, and returns that. The assignment reverses the ranks;
    the filter leaves one of them active."""

    def __init__(self, name: str, in_copy: bool) -> None:
        self.name, self.in_copy = name, in_copy

    def __call__(self, state: State, *more: Any) -> Any:
        state = copy.copy(state) if self.in_copy else state
        vars(state)["notes"] = (*vars(state).get("notes", ()), self.name)
        if self.name == "rank_assignment":
            state.rank = state.world_size - 1 - state.rank
        if self.name == "rank_filter":
            state.active_world_size = 1
            state.status = Status.ACTIVE if state.rank == 0 else Status.INACTIVE
        return (state, *more) if more else state


def change_the_state(in_copies: bool) -> tuple[str, str, int, tuple[str, ...]] | None:
    """The active rank raises; then the other one is active, and returns its place and the notes in its state."""
    names = ("initialize", "abort", "finalize", "health_check", "rank_assignment", "rank_filter")
    hooks: dict[str, Any] = {name: Changes(name, in_copies) for name in names}

    @Wrapper(**hooks)
    def function(call: CallWrapper | None = None) -> tuple[str, str, int, tuple[str, ...]]:
        assert call is not None
        if call.iteration == 0:
            signs.hold("inside", 1)
            raise ValueError("by schedule")
        return os.environ["RANK"], os.environ["WORLD_SIZE"], call.state.rank, vars(call.state)["notes"]

    return function()


def restart_by_a_chosen_signal() -> list[int]:
    """Rank 1 raises while rank 0 waits; return which of two signals are handled in the next iteration."""

    @Wrapper()
    def function(call: CallWrapper | None = None) -> list[int]:
        assert call is not None
        if call.iteration:
            numbers = (int(signal.SIGUSR2), signal.SIGRTMIN + 9)
            return [number for number in numbers if signal.getsignal(number) is not signal.SIG_DFL]
        if os.environ["RANK"] == "0":
            signs.show("waits", 0)
            threading.Event().wait()
        signs.await_sign(Path.cwd(), "waits", 0)
        raise ValueError("by schedule")

    return function()
