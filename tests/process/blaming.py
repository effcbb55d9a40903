"""What the ranks of the blame tests run: faults whose echoes on other ranks look like faults of their own."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess.abort import Abort
from resilience.inprocess.compose import Compose
from resilience.inprocess.finalize import Finalize
from resilience.inprocess.health_check import FaultCounter, HealthCheck
from resilience.inprocess.initialize import RetryController
from resilience.inprocess.state import State
from resilience.system import stacks
from tests.process.waited_for import be_patient
from tests.support import signs
from tests.support.signs import hold

GROUP_TIMEOUT = timedelta(minutes=30)


def build_groups(faults: int, most: int) -> int:
    """Initial rank 1 raises instead of building the next group, `faults` times; a rank may fail `most` times."""
    initial_rank = int(os.environ["RANK"])

    @Wrapper(health_check=FaultCounter(most))
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        ranks = list(range(dist.get_world_size()))
        for number in range(4):
            if initial_rank == 1 and call.iteration < faults and number == 2:
                raise ValueError("by schedule")
            dist.all_reduce(torch.ones(1), group=dist.new_group(ranks, timeout=GROUP_TIMEOUT))
        dist.destroy_process_group()
        return call.iteration

    return function()


def reduce_with_a_dying_rank() -> int:
    """Initial rank 1 is killed while the others wait for it in a collective; no rank may fail even once."""
    initial_rank = int(os.environ["RANK"])

    @Wrapper(health_check=FaultCounter(0))
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        if initial_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.all_reduce(ones, async_op=True)
        work.wait()
        dist.destroy_process_group()
        return call.iteration

    return function()


class ErrorsSeen(HealthCheck):
    """Notes the errors of its own rank."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def __call__(self, state: State, exc: Exception | None) -> tuple[State, Exception | None]:
        if exc is not None:
            self.errors.append(type(exc).__name__)
        return state, exc


def reduce_what_gloo_refuses() -> tuple[int, list[str]]:
    """Initial rank 1 alone raises, out of a collective; no rank may fail even once. Answers what the hooks get."""
    initial_rank = int(os.environ["RANK"])
    seen = ErrorsSeen()

    @Wrapper(health_check=Compose(FaultCounter(0), seen))
    def function(call: CallWrapper | None = None) -> tuple[int, list[str]]:
        assert call is not None
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        is_refused = initial_rank == 1 and call.iteration == 0
        dist.all_reduce(torch.ones(1, dtype=torch.int16 if is_refused else torch.int32))
        dist.destroy_process_group()
        return call.iteration, seen.errors

    return function()


class AbortCommunicator(Abort):
    """Ends what waits on a communicator, and returns when the error of that has reached the main thread."""

    def __init__(self) -> None:
        self.is_aborted = threading.Event()
        self.is_raised = threading.Event()

    def __call__(self, state: State) -> State:
        self.is_aborted.set()
        self.is_raised.wait(30)
        return state

    def wait(self) -> None:
        """What a communicator does that is aborted while a rank waits for it."""
        self.is_aborted.wait()
        self.is_raised.set()
        raise RuntimeError("NCCL communicator was aborted on this rank")


def be_aborted(faults: int) -> int:
    """Initial rank 1 raises; the others wait for a communicator that raises when it is aborted. No other rank may fail
    even once."""
    initial_rank = int(os.environ["RANK"])
    communicator = AbortCommunicator()

    @Wrapper(abort=communicator, health_check=FaultCounter(faults if initial_rank == 1 else 0))
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        communicator.is_aborted.clear()
        communicator.is_raised.clear()
        signs.show(f"entered {call.iteration}", initial_rank)
        if call.iteration < faults:
            if initial_rank == 1:
                for rank in range(int(os.environ["WORLD_SIZE"])):
                    signs.await_sign(Path.cwd(), f"entered {call.iteration}", rank)
                communicator.is_raised.set()
                raise ValueError("by schedule")
            communicator.wait()
        return call.iteration

    return function()


def fail_together(failing: list[int]) -> Any:
    """Some ranks raise at the same moment; answers how often each rank has been at fault."""
    initial_rank = int(os.environ["RANK"])
    counter = FaultCounter()

    @Wrapper(health_check=counter)
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if call.iteration == 0 and initial_rank in failing:
            hold("ready", initial_rank)
            raise ValueError("by schedule")
        if call.iteration == 0:
            threading.Event().wait()
        return counter.faults_count

    return function()


def give_up_below(least: int) -> int:
    """Initial rank 1 is killed; the others may not go on with fewer than `least` ranks."""
    initial_rank = int(os.environ["RANK"])

    @Wrapper(initialize=RetryController(min_active_world_size=least))
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        dist.all_reduce(torch.ones(1))
        if initial_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
        return call.iteration

    return function()


class FailingFinalize(Finalize):
    """Needs all ranks that there were."""

    def __call__(self, state: State, exc: Exception | None) -> tuple[State, Exception | None]:
        raise RuntimeError("cannot go on without rank 1")


def fail_in_finalize() -> int:
    """Initial rank 1 is killed; a hook of each survivor raises then."""
    initial_rank = int(os.environ["RANK"])

    @Wrapper(finalize=FailingFinalize())
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if initial_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()
        return call.iteration

    return function()


class DyingFinalize(Finalize):
    """Ends the process of initial rank 2."""

    def __call__(self, state: State, exc: Exception | None) -> tuple[State, Exception | None]:
        if state.initial_rank == 2:
            os._exit(7)
        return state, exc


def die_in_the_restart_after_a_hang() -> int:
    """Initial rank 1 waits for a lock that it holds, the others wait for it; rank 2 dies when they restart."""
    initial_rank = int(os.environ["RANK"])

    @Wrapper(soft_timeout=timedelta(seconds=5), hard_timeout=timedelta(seconds=60), finalize=DyingFinalize())
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        dist.all_reduce(torch.ones(1))
        if initial_rank == 1 and call.iteration == 0:
            lock = threading.Lock()
            with lock:
                lock.acquire()
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        return call.iteration

    return function()


def sleep_with_the_lock() -> int:
    """Initial rank 1 sleeps in C with the interpreter's lock, until any signal comes."""
    stacks.ASK_LIMIT = stacks.DUMP_LIMIT = 60.0  # on a busy machine its threads are seldom all asleep
    initial_rank = int(os.environ["RANK"])

    @Wrapper(soft_timeout=timedelta(seconds=6), hard_timeout=timedelta(seconds=60))
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        dist.all_reduce(torch.ones(1))
        if initial_rank == 1 and call.iteration == 0:
            ctypes.PyDLL(None).pause()
        dist.all_reduce(torch.ones(1))
        return call.iteration

    return function()


def end_then_hang() -> int:
    """Initial rank 2 is asked to stop in the first iteration; in the next one, initial rank 1 waits for a lock that it
    holds, and the others wait for it."""
    be_patient()
    initial_rank = int(os.environ["RANK"])

    @Wrapper(soft_timeout=timedelta(seconds=6), hard_timeout=timedelta(seconds=60))
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        dist.all_reduce(torch.ones(1))
        if initial_rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        if initial_rank == 1 and call.iteration == 1:
            lock = threading.Lock()
            with lock:
                lock.acquire()
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        return call.iteration

    return function()
