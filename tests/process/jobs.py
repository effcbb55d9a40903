"""What the ranks of the process tests run: a small all-reduce loop with faults by schedule.

A fault is `{"rank": initial rank, "iteration": i, "step": s, "kind": name}`; the kinds are the functions of
FAULTS. The loop's result does not depend on how often it was restarted or on who took part, so that every
test can compare it with that of an undisturbed run."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode

import resilience
from resilience.inprocess import CallWrapper, Compose, Wrapper
from resilience.inprocess._runtime import call as running
from resilience.inprocess._runtime import monitor_store
from resilience.inprocess.completion import Completion
from resilience.inprocess.finalize import Finalize
from resilience.inprocess.health_check import FaultCounter, HealthCheck
from resilience.inprocess.initialize import Initialize, RetryController
from resilience.inprocess.rank_assignment import FillGaps, FilterGroupedByKey, ShiftRanks
from resilience.inprocess.rank_filter import MaxActiveWorldSize, WorldSizeDivisibleBy
from resilience.inprocess.state import State
from resilience.inprocess.store import FileStore, StoreMixin
from resilience.inprocess.terminate import Terminate
from resilience.system import stacks
from tests.process import groups
from tests.support import signs, threads

STEPS = 12
RESULT = float(STEPS)  # every step adds the mean of ones
# Short, but longer than what a loaded machine may need to build a group: in C, where a rank shows no sign of life.
FAST = {"soft_timeout": 6.0, "hard_timeout": 15.0, "progress_watchdog_interval": 0.25, "termination_grace_time": 0.5}


def _raise(error: BaseException) -> None:
    raise error


def _segfault() -> None:
    ctypes.string_at(0)


def _hang_up() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    os.kill(os.getpid(), signal.SIGHUP)


def _hold_gil() -> None:
    sum(range(10**12))  # one call in C that looks neither for signals nor for other threads


def _spin() -> None:
    while True:
        pass


def _spin_and_ping(call: CallWrapper) -> None:
    while True:
        call.ping()


def _stall_after_ping(call: CallWrapper) -> None:
    call.ping()
    while True:
        pass


def _step_again() -> None:
    while True:
        resilience.step(0)
        time.sleep(0.01)


def _deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _swallow() -> None:
    for _ in range(3):
        try:
            time.sleep(60)
        except BaseException:
            pass
    time.sleep(60)


def _sit_in_section() -> None:
    with resilience.section("data"):
        time.sleep(60)


def _regex() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")


def _fill_memory() -> None:
    raise MemoryError("out of memory, by schedule")


GARBAGE = (
    b"\xff" * 40,
    b"\x91" * 60_000,
    b"\x82\xa4type\xa7emitted\xa6record\xa3a\xffb",
    b"\xdd\xff\xff\xff\xff",
    b"\0",
)


def _send_garbage(call: CallWrapper) -> None:
    """Send the monitor datagrams that nobody can decode, and a message that it does not expect."""
    channel = call._session._monitor._channel
    for data in GARBAGE:
        assert channel.send(data)


FAULTS: dict[str, Callable[[CallWrapper], Any]] = {
    "exception": lambda _: _raise(ValueError("broken, by schedule")),
    "memory_error": lambda _: _fill_memory(),
    "undecodable": lambda _: _raise(ValueError("cannot decode " + os.fsdecode(b"caf\xe9.jpg"))),
    "garbage": _send_garbage,
    "keyboard_interrupt": lambda _: _raise(KeyboardInterrupt()),
    "exit_3": lambda _: _raise(SystemExit(3)),
    "exit_0": lambda _: _raise(SystemExit(0)),
    "os_exit_0": lambda _: os._exit(0),
    "os_exit_1": lambda _: os._exit(1),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "kill_when_let_on": lambda _: (signs.hold("kill", int(os.environ["RANK"])), os.kill(os.getpid(), signal.SIGKILL)),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "hup": lambda _: _hang_up(),
    "usr1": lambda _: os.kill(os.getpid(), signal.SIGUSR1),
    "segfault": lambda _: _segfault(),
    "abort": lambda _: os.abort(),
    "bus": lambda _: os.kill(os.getpid(), signal.SIGBUS),
    "fpe": lambda _: os.kill(os.getpid(), signal.SIGFPE),
    "half_a_second": lambda _: time.sleep(0.5),
    "sleep": lambda _: time.sleep(60),
    "hold_gil": lambda _: _hold_gil(),
    "regex": lambda _: _regex(),
    "spin_after_ping": _stall_after_ping,
    "spin": lambda _: _spin(),
    "ping_for_ever": _spin_and_ping,
    "step_again": lambda _: _step_again(),
    "deadlock": lambda _: _deadlock(),
    "swallow": lambda _: _swallow(),
    "section": lambda _: _sit_in_section(),
}


class FaultyHook(Initialize, HealthCheck, Finalize):
    """A hook that fails by schedule: {"hook": name, "rank": …, "iteration": …, "kind": fault}."""

    def __init__(self, name: str, faults: list[dict[str, Any]]) -> None:
        self.name = name
        self.faults = [fault for fault in faults if fault.get("hook") == name]

    def __call__(self, state: State, *exc: Any) -> Any:
        for fault in self.faults:
            if (fault["rank"], fault["iteration"]) == (state.initial_rank, state.iteration):
                FAULTS[fault["kind"]](None)  # type: ignore[arg-type]
        return (state, *exc) if exc else state


class UsersStore(dist.FileStore, StoreMixin):
    """A store of the user's own: any torch Store with the mixin."""

    def __init__(self, path: str) -> None:
        super().__init__(path, -1)


def wrapper_of(
    options: dict[str, float], hooks: dict[str, Any], faults: list[dict[str, Any]], store_file: str = ""
) -> Wrapper:
    named: dict[str, Any] = {name: timedelta(seconds=value) for name, value in options.items()}
    if "spares" in hooks:
        named["rank_filter"] = MaxActiveWorldSize(int(os.environ["WORLD_SIZE"]) - hooks["spares"])
    if "divisible" in hooks:
        named["rank_filter"] = WorldSizeDivisibleBy(hooks["divisible"])
    if "fill_gaps" in hooks:
        named["rank_assignment"] = FillGaps()
    if "groups_of" in hooks:
        size = hooks["groups_of"]
        key = int(os.environ["RANK"]) // size
        named["rank_assignment"] = Compose(ShiftRanks(), FilterGroupedByKey(key, lambda count: count == size))
    if "max_iterations" in hooks:
        named["initialize"] = RetryController(max_iterations=hooks["max_iterations"])
    if "max_rank_faults" in hooks:
        named["health_check"] = FaultCounter(hooks["max_rank_faults"])
    for name in ("initialize", "finalize", "health_check"):
        if any(fault.get("hook") == name for fault in faults):
            named[name] = FaultyHook(name, faults)
    if store_file:
        factory = UsersStore if hooks.get("users_store") else FileStore
        named |= {"store_factory": factory, "store_kwargs": {"path": store_file}}
    return Wrapper(monitor_process_logfile=str(Path.cwd() / "monitor-{rank}.log"), **named)


def fault_at(fault: dict[str, Any], rank: int, iteration: int, step: int, kind: str) -> bool:
    """Whether a fault that changes the loop itself is due."""
    due = (fault["rank"], fault["iteration"], fault.get("step")) == (rank, iteration, step)
    return due and fault["kind"] == kind


def train_and_export(**kwargs: Any) -> Any:
    """Train; the monitor that exports has time to send everything when it leaves, also on a busy machine."""
    from resilience.inprocess._runtime import supervision

    supervision.EXPORT_LIMIT = 60.0  # the monitor is forked
    return train(**kwargs)


def train_patiently(asks: bool = True, **kwargs: Any) -> Any:
    """Train; the monitor waits for the stacks that a busy machine is slow to give. asks: a thread of the rank, too."""
    stacks.DUMP_LIMIT = 60.0  # the monitor is forked
    if asks:
        stacks.ASK_LIMIT = 60.0
    return train(**kwargs)


def train(
    faults: list[dict[str, Any]] = [],  # noqa: B006  only read
    steps: int = STEPS,
    options: dict[str, float] = {},  # noqa: B006
    hooks: dict[str, Any] = {},  # noqa: B006
    calls: int = 1,
    store_file: str = "",
    group_timeout: float = 1800.0,
) -> Any:
    """Run the loop wrapped; answers its result, of the last call where there are several."""
    initial_rank = int(os.environ["RANK"])

    @wrapper_of(options, hooks, faults, store_file)
    def loop(call: CallWrapper | None = None) -> float:
        assert call is not None
        dist.init_process_group("gloo", timeout=timedelta(seconds=group_timeout))
        total = torch.zeros(1)
        for step in range(steps):
            resilience.step(step)
            for fault in faults:
                due = (fault["rank"], fault["iteration"], fault.get("step")) == (initial_rank, call.iteration, step)
                if due and "hook" not in fault and fault["kind"] in FAULTS:
                    FAULTS[fault["kind"]](call)
            if any(fault_at(fault, initial_rank, call.iteration, step, "skip") for fault in faults):
                total += 1
                continue
            ones = torch.ones(2 if any(fault_at(f, initial_rank, call.iteration, step, "shape") for f in faults) else 1)
            with resilience.section("reduce"):
                dist.all_reduce(ones)
            total += ones[0] / dist.get_world_size()
        dist.destroy_process_group()
        return float(total)

    value = None
    for _ in range(calls):
        value = loop()
    return value


def resume_training() -> int:
    """Train from a checkpoint of step 100, after half a second of loading; a step takes 0.1 s, and every step but the
    last two is in a later checkpoint. Rank 1 fails once, in step 106. Return the last step."""

    @wrapper_of({}, {}, [])
    def loop(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group("gloo")
        with resilience.section("load"):
            time.sleep(0.5)
        for step in range(104 if call.iteration else 100, 110):
            resilience.step(step)
            if (call.iteration, os.environ["RANK"], step) == (0, "1", 106):
                raise ValueError("by schedule")
            time.sleep(0.1)
            dist.barrier()
        dist.destroy_process_group()
        return step

    return loop()


def train_with_evidence(**kwargs: Any) -> Any:
    """Train; after a hang nothing is cut before all ranks have been seen, also on a busy machine."""
    from resilience.core import watch
    from resilience.inprocess._runtime import watcher

    watch.EVIDENCE = watcher.EVIDENCE = 60.0  # type: ignore[attr-defined]  # the monitor is forked
    return train(**kwargs)


def save_and_fail() -> tuple[int, int]:
    """Save a checkpoint that one rank cannot write: torch raises on all ranks. Return the iteration that completed and
    how many faults this rank's FaultCounter counted."""
    counter = FaultCounter()

    @Wrapper(health_check=counter)
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group("gloo")
        if call.iteration == 0:
            state: dict[str, Any] = {"value": torch.ones(1)}
            if os.environ["RANK"] == "1":
                state["of rank 1"] = UnsavedTensor()
            dcp.save(state, checkpoint_id="checkpoint")
        dist.barrier()  # a rank that destroyed its group would fail the other, which still builds it
        dist.destroy_process_group()
        return call.iteration

    return function(), counter.faults_count


class UnsavedTensor:
    """What cannot be written into a checkpoint."""

    def __reduce__(self) -> Any:
        raise ValueError("cannot be saved")


class SeeModes(Initialize, Finalize, HealthCheck, Terminate):
    """Keeps the modes of torch that a hook meets, before the function starts and after a fault."""

    def __init__(self) -> None:
        self.modes: list[dict[str, Any]] = []

    def __call__(self, state: State, exception: Exception | None = None) -> Any:
        self.modes.append(modes_of_torch())
        return state


def leave_modes_on() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Fail inside torch's modes, as if an interruption had kept each context manager from leaving its own. Returns
    the modes before the call and those that the hooks and the next iteration meet."""
    torch.set_default_device("cpu")  # an inner default device takes its place on torch's stack
    before = modes_of_torch()

    see = SeeModes()

    @Wrapper(initialize=see, finalize=see, health_check=see)
    def function(call: CallWrapper | None = None) -> dict[str, Any]:
        assert call is not None
        if call.iteration == 0:
            enter_modes()
            signs.hold("inside", int(os.environ["RANK"]))
            raise ValueError("by schedule")
        return modes_of_torch()

    return before, [function(), *see.modes]


def exit_with_modes_on() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Exit inside torch's modes. Returns the modes before the call and those after it, and in its last hook."""
    before, see = modes_of_torch(), SeeModes()

    @Wrapper(terminate=see)
    def function() -> None:
        enter_modes()
        sys.exit(3)

    try:
        function()
    except SystemExit:
        see.modes.append(modes_of_torch())
    return before, see.modes


def exit_with_modes_that_cannot_be_restored() -> None:
    calls = itertools.count()

    def fails(modes: Any) -> None:
        if next(calls):  # the first one follows the abort, where it would be a failure like others
            raise RuntimeError("no such mode")

    running.restore = fails
    Wrapper()(lambda: sys.exit(3))()


def modes_set_by_a_hook() -> str:
    """Return the default device in a function whose `initialize` hook has set it."""

    class OnMeta(Initialize):
        def __call__(self, state: State) -> State:
            torch.set_default_device("meta")
            return state

    return Wrapper(initialize=OnMeta())(lambda: str(torch.get_default_device()))()


def enter_modes() -> None:
    torch.no_grad().__enter__()
    torch.autocast("cpu", dtype=torch.float16, cache_enabled=False).__enter__()
    torch.device("meta").__enter__()
    FakeTensorMode().__enter__()
    torch.autograd.graph.saved_tensors_hooks(repr, repr).__enter__()
    torch.autograd.set_multithreading_enabled(False)
    torch.autograd.forward_ad.dual_level().__enter__()
    torch.autograd.forward_ad._set_fwd_grad_enabled(False)
    torch._C._functorch._grad_increment_nesting()


def modes_of_torch() -> dict[str, Any]:
    """Return what user code sees of torch's modes."""
    weight = torch.ones(1, requires_grad=True)
    torch.autocast_increment_nesting()
    return {
        "gradients": torch.is_grad_enabled(),
        "forward gradients": torch._C._is_fwd_grad_enabled(),
        "threads of backward": torch._C._is_multithreading_enabled(),
        "dual level": torch.autograd.forward_ad._current_level,
        "derivative": torch.func.grad(lambda value: (value * value).sum())(weight).tolist(),
        "saved": str((weight * weight).grad_fn._saved_self),  # type: ignore[union-attr]
        "transforms": torch._C._functorch.get_dynamic_layer_stack_depth(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast type": str(torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "autocast nesting": torch.autocast_decrement_nesting(),
        "device": str(torch.ones(1).device),
        "default device": str(torch.get_default_device()),
        "CUDA": torch.cuda.is_initialized(),
    }


def train_after_autocast_was_left_on() -> tuple[list[float], list[float]]:
    """Fail inside autocast, as if an interruption had kept it from being left. Returns the losses of the same training
    before the call and in the next iteration."""
    before = losses_under_autocast()

    @Wrapper()
    def function(call: CallWrapper | None = None) -> tuple[list[float], list[float]]:
        assert call is not None
        if call.iteration == 0:
            torch.autocast("cpu").__enter__()
            raise ValueError("by schedule")
        return before, losses_under_autocast()

    return function()


def losses_under_autocast() -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.randn(64, 16)
    losses = []
    for _ in range(4):
        with torch.autocast("cpu"):
            loss = (model(data).float() - data.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _show_once_blocked(main: int) -> None:
    groups.await_blocked(main)
    signs.show("waits", 0)


def wait_behind_an_expired_receive() -> int:
    """Rank 0 waits in a collective for a connection that gloo no longer reads: it began a receive and forgot it, as a
    collective does that fails, and rank 1 has sent the message. Rank 2 fails. Returns the iteration that succeeds."""

    @Wrapper(soft_timeout=timedelta(seconds=10), hard_timeout=timedelta(seconds=20))
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group("gloo", timeout=timedelta(minutes=30))
        message, rank = torch.ones(1000), dist.get_rank()
        if call.iteration == 0:
            if rank == 0:
                dist.irecv(message, src=1, tag=1)
            dist.all_reduce(message)
            if rank == 0:
                threading.Thread(target=_show_once_blocked, args=(threading.get_ident(),)).start()
            if rank == 1:
                dist.send(message, dst=0, tag=1)
                dist.send(message, dst=2, tag=2)
            if rank == 2:
                dist.recv(message, src=1, tag=2)
                signs.await_sign(Path.cwd(), "waits", 0)
                raise ValueError("by schedule")
        dist.all_reduce(message)
        return call.iteration

    return function()


def finish_apart() -> int:
    """Rank 0 returns at once; rank 1 fails while rank 0 waits for it to complete."""

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if os.environ["RANK"] == "1" and call.iteration == 0:
            arrived = call._session.store  # wait until rank 0 has arrived at the completion barrier
            arrived.wait(["0/completion/0/0"], timedelta(seconds=30))
            raise ValueError("after the other had completed")
        return call.iteration

    return function()


def wait_for_sign(options: dict[str, float] = {}) -> int:  # noqa: B006  only read
    """Wait, in Python, until the file `go` is there; answers the iteration in which it was."""

    @wrapper_of(options, {}, [])
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if (call.iteration, os.environ["RANK"]) == (0, "2"):
            threading.Thread(target=hold_gil_when_asked, daemon=True).start()
        while not Path("go").exists():
            time.sleep(0.01)
        if Path("raise").exists() and call.iteration == 0 and os.environ["RANK"] == "1":
            raise ValueError("by schedule")
        return call.iteration

    return function()


def build_a_group_when_asked(
    options: dict[str, float] = {},  # noqa: B006  only read
    monitor_is_late: bool = False,
) -> int:
    """Build a process group over the iteration's store, once the file `go` is there. Returns the iteration.

    monitor_is_late: rank 1's monitor begins the call once it is let on."""
    folder, agree = Path.cwd(), monitor_store.agree_on_folder

    def begin_late(*args: Any) -> str:
        signs.show("beginning", 1, folder)
        signs.await_file(folder / "beginning.go", 120.0)
        return agree(*args)

    if monitor_is_late and os.environ["RANK"] == "1":  # the monitor is forked
        monitor_store.agree_on_folder = begin_late

    @wrapper_of(options, {}, [])
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        while not Path("go").exists():
            time.sleep(0.01)
        dist.init_process_group("gloo")
        return call.iteration

    return function()


def destroy_groups_in_a_finally(restarts: int, all_fail: bool) -> int:
    """Train, fail a few times, and destroy the groups in a `finally` each time. Returns the last iteration."""

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group("gloo")
        try:
            rank = dist.get_rank()
            for step in itertools.count():
                dist.all_reduce(torch.ones(1))
                if call.iteration >= restarts:
                    return call.iteration
                if step == 20 + call.iteration and (all_fail or rank == call.iteration % 3):
                    raise ValueError("by schedule")
        finally:
            dist.destroy_process_group()

    return function()


def break_while_others_wait(kind: str) -> int:
    """Rank 1 breaks in iteration 0 once it is let on. The others wait in a function that only the restart ends."""
    rank = int(os.environ["RANK"])

    def wait_for_the_restart() -> None:
        signs.hold("waiting", rank)

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if call.iteration == 0:
            if rank == 1:
                signs.hold("breaking", rank)
                FAULTS[kind](call)
            wait_for_the_restart()
        return call.iteration

    return function()


def leave_early(how: str, heartbeat: float = 30.0) -> int:
    """Rank 1 ends before the others: it `completes`, perhaps after it has held `in its hook`, and they hold in their
    completion hooks; or it `leaves`, and they hold in the next iteration."""
    rank = int(os.environ["RANK"])

    class Hold(Completion):
        def __call__(self, state: State) -> State:
            if rank != 1:
                signs.hold("last", rank)
            elif how == "in its hook":
                signs.hold("hook", rank)
            return state

    @Wrapper(completion=Hold(), heartbeat_timeout=timedelta(seconds=heartbeat))
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if call.iteration == 0:
            signs.hold("first", rank)
            if how == "leaves":
                if rank == 1:
                    sys.exit(3)
                threading.Event().wait(120)  # until it is interrupted
        elif rank != 1:
            signs.hold("last", rank)
        return call.iteration

    return function()


def wait_with_a_child(options: dict[str, float] = {}) -> int:  # noqa: B006  only read
    """Like `wait_for_sign`; rank 1 has a child that keeps its connections, as data loader workers do. The child's
    process id is in the file `child`."""

    @wrapper_of(options, {}, [])
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if (call.iteration, os.environ["RANK"]) == (0, "1"):
            child = os.fork()
            if child == 0:
                time.sleep(120)
                os._exit(0)
            Path("child.new").write_text(str(child))
            Path("child.new").rename("child")
        while not Path("go").exists():
            time.sleep(0.01)
        return call.iteration

    return function()


def complete_with_a_long_command_line() -> int:
    """Return the iteration in which a function completes whose process has 100,000 bytes of arguments."""
    sys.argv = ["train.py", "--short", *(f"--data-path={number:05}" + "x" * 82 for number in range(1000))]

    @wrapper_of({}, {}, [])
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        return call.iteration

    return function()


def stop_at_the_start_of_the_call(options: dict[str, float] = {}) -> int:  # noqa: B006  only read
    """Return the iteration in which the function completes. Rank 2 stops before its call asks the store."""

    @wrapper_of(options, {}, [])
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        return call.iteration

    def stop(frame: FrameType, event: str, _argument: object) -> None:
        if (event, frame.f_code.co_name, frame.f_globals.get("__name__")) == (
            "call",
            "enter",
            "resilience.core.restart",
        ):
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGSTOP)

    if os.environ["RANK"] == "2":
        sys.setprofile(stop)
    return function()


def hold_gil_when_asked() -> None:
    """Hold the GIL from when the file `gil` is there, for longer than any test lasts."""
    while not Path("gil").exists():
        time.sleep(0.01)
    ctypes.PyDLL(None).sleep(1000)


class Held(NamedTuple):
    """What a process holds."""

    resident_kib: int
    threads: int
    descriptors: int

    @classmethod
    def now(cls) -> Held:
        process = psutil.Process()
        return cls(process.memory_info().rss // 1024, threads.count(), process.num_fds())


def settled(at_most: Held | None = None) -> Held:
    """Return what this process holds once that has not changed for a second, or once it is `at_most` that; after a
    minute whatever it then is. Groups of the iteration before go in the background."""
    held, looks = Held.now(), 0
    deadline = time.monotonic() + 60
    while looks < 20 and time.monotonic() < deadline:
        if at_most is not None and held.threads <= at_most.threads and held.descriptors <= at_most.descriptors:
            break
        time.sleep(0.05)
        now = Held.now()
        looks = looks + 1 if now[1:] == held[1:] and at_most is None else 0
        held = now
    return held


def restart_often(restarts: int, looks: int) -> list[Held]:
    """Fail in every iteration but the last. Return what the process holds when it has settled, `looks` times, after
    equal numbers of restarts: at the first look what is made once is there."""
    seen: list[Held] = []

    @Wrapper()
    def function(call: CallWrapper | None = None) -> list[Held]:
        assert call is not None
        if call.iteration > 0 and call.iteration % (restarts // looks) == 0:
            seen.append(settled(at_most=seen[0] if seen else None))
        dist.init_process_group("gloo")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        if call.iteration < restarts:
            if call.iteration % dist.get_world_size() == dist.get_rank():
                raise ValueError("by schedule")
            dist.all_reduce(ones)
        dist.destroy_process_group()
        return seen

    return function()


def train_beside_a_thread(hooks: dict[str, Any] = {}) -> Any:  # noqa: B006  only read
    """The loop, in a process that has a thread of its own already."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, args=(120,), name="user-thread")
    thread.start()
    try:
        return train(faults=[{"rank": 1, "iteration": 0, "step": 5, "kind": "exception"}], hooks=hooks)
    finally:
        end.set()
        thread.join()


def train_while_the_clock_jumps() -> Any:
    """The loop, with a wall clock that steps by an hour, back and forth, at every look."""
    real, jumps = time.time_ns, itertools.cycle((0, 3600, -3600))
    time.time_ns = lambda: real() + next(jumps) * 10**9
    time.time = lambda: time.time_ns() / 1e9
    return train(faults=[{"rank": 1, "iteration": 0, "step": 5, "kind": "kill"}])


def train_unread(**options: Any) -> Any:
    """The loop, in a process whose stderr is a full pipe that nobody reads."""
    from tests.process.launching import close_the_readers_eyes

    close_the_readers_eyes()
    return train(**options)


def train_on_a_frozen_disk() -> float:
    """The loop with a line of the program's own logger in each step. Rank 1 freezes the disk of the run, and fails."""

    @Wrapper()
    def loop(call: CallWrapper | None = None) -> float:
        assert call is not None
        dist.init_process_group("gloo")
        total = torch.zeros(1)
        for step in range(STEPS):
            resilience.step(step)
            resilience.get_logger().info("a line", number=step)
            if (os.environ["RANK"], call.iteration, step) == ("1", 0, 3):
                subprocess.run(["fsfreeze", "--freeze", os.environ["FREEZE"]], check=True)
                raise RuntimeError("broken")
            dist.all_reduce(total)
        dist.destroy_process_group()
        return float(total)

    value: float = loop()
    signs.show("done", int(os.environ["RANK"]))
    return value


def die_before_the_monitor_runs() -> Any:
    """Rank 1 is killed while it waits for its monitor, a fresh process, which is not set up before that."""
    from resilience.inprocess._runtime.monitor_process import Handle
    from tests.process import late_filter

    if os.environ["RANK"] == "1":
        os.environ[late_filter.AWAITED] = str(os.getpid())
        Handle.await_connected = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    end = threading.Event()
    threading.Thread(target=end.wait, args=(120,), name="user-thread", daemon=True).start()

    @Wrapper(rank_filter=late_filter.LateFilter())
    def work(call: CallWrapper | None = None) -> str:
        return "done"

    try:
        return work()
    finally:
        end.set()
