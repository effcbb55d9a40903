"""What the ranks of the tests of hosting do. Each is called by name in a process of its own."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess._runtime import call, monitor_store, supervision
from resilience.inprocess.completion import Completion
from resilience.inprocess.state import State
from resilience.inprocess.store import TCPStore
from tests.support import signs


def restart_once(
    port: int, timeout: float = 60.0, open_files: int | None = None, soft: int | None = None
) -> dict[str, Any]:
    """Fail once on rank 1, with a store on a port of its own.

    open_files: the process's hard limit from here on; soft: its soft limit, if that is another one."""
    if open_files is not None or soft is not None:
        hard = open_files or resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft or hard, hard))

    @Wrapper(store_kwargs={"port": port, "timeout": timedelta(seconds=timeout)})
    def train(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group("gloo")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        if call.iteration == 0 and dist.get_rank() == int(os.environ["WORLD_SIZE"]) - 1:
            raise ValueError("by schedule")
        dist.all_reduce(ones)
        dist.destroy_process_group()
        return call.iteration

    return {"iteration": train(), "soft": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}


def hold_after_a_restart(port: int) -> int:
    """Restart once, and hold in the next iteration with every connection open."""

    @Wrapper(store_kwargs={"port": port})
    def train(call: CallWrapper | None = None) -> int:
        assert call is not None
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if call.iteration == 0 and os.environ["RANK"] == "1":
            raise ValueError("by schedule")
        dist.all_reduce(torch.ones(1))
        signs.hold("again", int(os.environ["RANK"]))
        dist.destroy_process_group()
        return call.iteration

    return train()


def rank_0_changes_the_address() -> str:
    """Rank 0 sets MASTER_ADDR to an address that nobody has, and raises once it is let on. Answers the address at
    which the ranks met."""

    @Wrapper()
    def train(call: CallWrapper | None = None) -> str:
        assert call is not None
        if call.iteration == 0:
            if os.environ["RANK"] == "0":
                os.environ["MASTER_ADDR"] = "192.0.2.1"
                signs.hold("changed", 0)
                raise ValueError("by schedule")
            while True:
                time.sleep(0.01)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        return os.environ["MASTER_ADDR"]

    return train()


def no_process_hosts_the_iterations_store() -> None:
    """Neither rank 0 nor its monitor, which is forked from it, can open a server for process groups."""

    def refuse(address: str) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monitor_store.iteration_server = refuse

    call.HOST_LIMIT = 0.5  # seconds that rank 0 waits for its monitor

    @Wrapper()
    def train() -> None:
        pass

    train()


def monitor_finds_no_store(barrier: float) -> None:
    """Wait in vain: the monitor of rank 1 never gets an answer from the store's host."""
    rank_pid = os.getpid()

    def factory(**kwargs: Any) -> dist.Store:
        if os.getpid() != rank_pid and os.environ["RANK"] == "1":
            time.sleep(3600)
        return TCPStore(**kwargs)

    longest = timedelta(seconds=barrier)  # all other limits must be shorter

    @Wrapper(
        store_factory=factory,
        soft_timeout=longest / 3,
        hard_timeout=longest / 2,
        heartbeat_timeout=longest / 2,
        barrier_timeout=longest,
    )
    def train() -> None:
        pass

    train()


def monitor_connects_late(
    fails: int = 0, is_held: bool = False, heartbeat: float = 30.0, first_limit: float = 60.0, barrier: float = 120.0
) -> int:
    """Wait in the function until the test lets it go. Answers the iteration.

    fails: how many connections of rank 1's monitor fail first. is_held: its first one waits for the test.
    first_limit: seconds for which it tries again. barrier: the limit of the ranks' barriers."""
    monitor_store.FIRST_LIMIT = first_limit  # the monitor is forked
    rank_pid, is_rank_1 = os.getpid(), os.environ["RANK"] == "1"
    tries = itertools.count()

    def factory(**kwargs: Any) -> dist.Store:
        if os.getpid() != rank_pid and is_rank_1:
            number = next(tries)
            if is_held and number == 0:
                signs.hold("connects", 1)
            if number < fails:
                raise RuntimeError("connection reset by peer")
        return TCPStore(**kwargs)

    hard = 0.75 * barrier
    limits = {"soft_timeout": hard / 2, "hard_timeout": hard, "barrier_timeout": barrier, "completion_timeout": 120.0}

    @Wrapper(
        store_factory=factory,
        heartbeat_timeout=timedelta(seconds=heartbeat),
        **{name: timedelta(seconds=limit) for name, limit in limits.items()},  # type: ignore[arg-type]
    )
    def train(call: CallWrapper | None = None) -> int:
        assert call is not None
        signs.show("entered", int(os.environ["RANK"]))
        while not Path("train.go").exists():  # in Python, so that a restart can interrupt it
            time.sleep(0.01)
        return call.iteration

    return train()


def monitor_does_not_supervise(when: str) -> int:
    """Wait in the function until the test lets it go. Answers the iteration. The monitor of rank 1 cannot `start` to
    supervise its node, or it fails in its first `round`."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    if os.environ["RANK"] == "1":  # the monitor is forked
        setattr(supervision.Supervisor, {"start": "start", "round": "_act"}[when], refuse)

    @Wrapper(heartbeat_timeout=timedelta(seconds=3))
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        while not Path("go").exists():  # in Python, so that a restart can interrupt it
            time.sleep(0.01)
        return call.iteration

    return function()


def cannot_start_a_monitor(how: str) -> int:
    """Call a function while this host has no process left."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    if how == "executed":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        subprocess.Popen = refuse  # type: ignore[assignment,misc]
    else:
        os.fork = refuse

    @Wrapper()
    def train() -> int:
        return 1

    return train()


def thread_is_refused_once(name: str) -> int:
    """The first thread of that name does not start: in the rank, or in its monitor, which is forked from it."""
    start, refused = threading.Thread.start, list[str]()

    def perhaps(thread: threading.Thread) -> None:
        if thread.name == name and not refused:
            refused.append(name)
            signs.show("refused", int(os.environ["RANK"]), folder)
            raise RuntimeError("can't start new thread")
        start(thread)

    folder = Path.cwd()
    threading.Thread.start = perhaps  # type: ignore[method-assign]

    @Wrapper()
    def train() -> int:
        return 1

    return train()


def hold_in_the_last_hook() -> int:
    """Rank 1 holds in its completion hook."""

    class Hold(Completion):
        def __call__(self, state: State) -> State:
            if os.environ["RANK"] == "1":
                signs.hold("hook", 1)
            return state

    @Wrapper(completion=Hold())
    def train() -> int:
        return 1

    return train()


def some_meet_by_url(port: int) -> int:
    """Name the place of a group of two of three ranks in a URL, in two iterations; return the sum over the two."""

    @Wrapper()
    def train(call: CallWrapper | None = None) -> int:
        assert call is not None
        rank = int(os.environ["RANK"])
        ones = torch.ones(1)
        if rank < 2:
            url = f"tcp://127.0.0.1:{port}"
            dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2, timeout=timedelta(seconds=60))
            dist.all_reduce(ones)
        if call.iteration == 0 and rank == 2:
            raise ValueError("by schedule")
        while call.iteration == 0:
            time.sleep(0.01)
        return int(ones)

    return train()


def meet_by_url(port: int) -> dict[str, Any]:
    """Name the place of the process group in a URL, in the way of scripts that do not use the environment."""
    from torch.distributed import rendezvous  # the function; its module has the handlers

    handlers = rendezvous.__globals__["_rendezvous_handlers"]
    before = dict(handlers)

    @Wrapper()
    def train(call: CallWrapper | None = None) -> int:
        assert call is not None
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        if call.iteration == 0 and rank == size - 1:
            raise ValueError("by schedule")
        dist.all_reduce(ones)
        dist.destroy_process_group()
        return int(ones)

    return {"sum": train(), "is_as_before": handlers == before}
