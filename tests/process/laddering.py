"""What the ranks of the ladder tests run: one fails while another is somewhere that takes long to leave."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess.abort import Abort, AbortTorchDistributed
from resilience.inprocess.initialize import Initialize
from resilience.inprocess.state import State
from tests.support.signs import LOOK_EVERY, await_sign, hold, show

_kept: list[Any] = []


def save_on_a_slow_disk() -> int:
    """Rank 0 writes a checkpoint on a disk that has nothing before the test lets "written" go, when rank 1 raises."""
    rank = int(os.environ["RANK"])

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if call.iteration == 0 and rank == 0:
            restore = functools.partial(setattr, os, "fsync", os.fsync)
            os.fsync = _native_wait(rank, "written", restore)  # type: ignore[assignment]
            dcp.save({"weight": torch.ones(4)}, checkpoint_id=str(Path.cwd() / "checkpoint"), no_dist=True)
        if call.iteration == 0:
            hold("ready", rank)
            raise ValueError("by schedule")
        return call.iteration

    return function()


def _native_wait(rank: int, until: str | None = None, then: Callable[[], object] = lambda: None) -> Callable[..., Any]:
    """Return a function that waits in native code, where neither a signal nor a cut reaches it. Once it waits there,
    the rank shows "waits". When the test lets `until` go, `then` is called and the function returns.

    There is no Python frame in it: a stack shows its caller, as for fsync."""
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)  # zeros are PTHREAD_MUTEX_INITIALIZER; 40 bytes on x86-64
    libc.pthread_mutex_lock(mutex)
    _kept.append(mutex)

    def let_go() -> None:
        if until is not None:
            hold(until, rank)
            then()
            libc.pthread_mutex_unlock(mutex)

    _show_once(lambda: ctypes.c_int.from_buffer(mutex).value == 2, rank, let_go)  # glibc: locked, and somebody waits
    return functools.partial(libc.pthread_mutex_lock, mutex)


def _show_once(waits: Callable[[], bool], rank: int, then: Callable[[], None] = lambda: None) -> None:
    """Show "waits" for a main thread that cannot do it itself, because it waits in native code: a sign before it
    would let a test interrupt the Python code on the way there."""

    def look() -> None:
        while not waits():
            time.sleep(LOOK_EVERY)
        show("waits", rank)
        then()

    threading.Thread(target=look, daemon=True).start()


def wait_for_a_file_store(limits: dict[str, float], group_timeout: float) -> int:
    """Rank 0 builds a group over a FileStore of its own, to which rank 1 never comes because it raises."""
    rank = int(os.environ["RANK"])

    @Wrapper(**{name: timedelta(seconds=value) for name, value in limits.items()})
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if call.iteration == 0 and rank == 0:
            meeting = Path.cwd() / "meeting"
            store = dist.FileStore(str(meeting), 2)
            _show_once(lambda: b"//cpu//" in meeting.read_bytes(), rank)  # what gloo writes before it waits
            limit = timedelta(seconds=group_timeout)
            dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=limit)
        if call.iteration == 0:
            hold("ready", rank)
            raise ValueError("by schedule")
        return call.iteration

    return function()


class SlowAbort(AbortTorchDistributed):
    """Takes long for what it does, as the abort of an accelerator's communicator may."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, state: State) -> State:
        time.sleep(self.seconds)
        return super().__call__(state)


def abort_slowly(seconds: float) -> int:
    """All ranks but the last, which raises, are in a collective; each one's abort takes `seconds`."""
    rank = int(os.environ["RANK"])

    @Wrapper(abort=SlowAbort(seconds))
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group("gloo", timeout=timedelta(minutes=30))
        if call.iteration == 0 and rank == dist.get_world_size() - 1:
            raise ValueError("by schedule")
        dist.all_reduce(torch.ones(1))  # a rank that destroyed its group would fail the other, which still builds it
        dist.destroy_process_group()
        return call.iteration

    return function()


class HangingAbort(Abort):
    """Does not return on the rank whose function did not fail."""

    def __call__(self, state: State) -> State:
        while state.rank == 1:
            time.sleep(1.0)
        return state


class WaitForTheAbort(Initialize):
    """Does not return on rank 1 in iteration 0, unless it is interrupted."""

    def __call__(self, state: State) -> State:
        while state.rank == 1 and state.iteration == 0:
            show("waits", state.rank)
            time.sleep(0.01)
        return state


def hang_in_the_abort(place: str) -> int:
    """Rank 0 raises once rank 1 is in `place`, the function or a hook. The abort hook of rank 1 hangs."""
    rank = int(os.environ["RANK"])
    soft, hard, interval = timedelta(seconds=4), timedelta(seconds=6), timedelta(seconds=1)
    limits = {"soft_timeout": soft, "hard_timeout": hard, "progress_watchdog_interval": interval}
    initialize = WaitForTheAbort() if place == "initialize" else None

    @Wrapper(abort=HangingAbort(), initialize=initialize, **limits)
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if call.iteration == 0 and rank == 0:
            await_sign(Path.cwd(), "waits", 1)
            raise ValueError("by schedule")
        while call.iteration == 0:
            show("waits", rank)
            time.sleep(0.01)
        return call.iteration

    return function()


def stay_in_group_building() -> int:
    """Rank 0 sleeps where gloo builds a group over the store of the iteration; nothing frees it."""
    rank = int(os.environ["RANK"])

    @Wrapper()
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        if call.iteration == 0 and rank == 0:
            dist.PrefixStore._as_parameter_ = 0  # what the function in C makes of this argument
            dist.distributed_c10d.ProcessGroupGloo = _native_wait(rank)
            dist.init_process_group("gloo")
        if call.iteration == 0:
            hold("ready", rank)
            raise ValueError("by schedule")
        return call.iteration

    return function()
