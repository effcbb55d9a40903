"""Runs test bodies in forked processes, and ranks in forks of one process that has imported torch.

A body is a module-level function; what it returns comes back, what it raises fails the test with its
traceback. A body that does not end in time prints the stacks of all its threads and is ended by pid."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

PR_SET_PDEATHSIG = 1
Body = tuple[Callable[..., Any], tuple[Any, ...]]
Outcome = tuple[bool, Any]  # it returned, its value; it did not, what happened


def forked(function: Callable[..., Any], *args: Any, limit: float = 20.0) -> Any:
    """Return what `function(*args)` returns in a process of its own."""
    return _values(_run([(function, args)], limit))[0]


class Preloaded:
    """A process that has imported torch and has one thread. `ranks` forks a world from it."""

    def __init__(self) -> None:
        self._connection, there = multiprocessing.Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._connection.close()
                _serve(there)
            finally:
                os._exit(0)
        there.close()

    def __enter__(self) -> Preloaded:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        os.waitpid(self._pid, 0)

    def ranks(self, function: Callable[..., Any], world: int, *args: Any, limit: float = 30.0) -> list[Any]:
        """Return the values of `function(rank, world, folder, *args)`; folder: empty, the world's own."""
        with tempfile.TemporaryDirectory() as folder:
            bodies = [(function, (rank, world, folder, *args)) for rank in range(world)]
            self._connection.send((bodies, limit))
            return _values(self._connection.recv())


def _serve(connection: Any) -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
    import torch.distributed  # noqa: F401

    while True:
        try:
            bodies, limit = connection.recv()
        except EOFError:
            return
        connection.send(_run(bodies, limit))


def _values(outcomes: Sequence[Outcome]) -> list[Any]:
    failures = [f"process {i}: {what}" for i, (has_returned, what) in enumerate(outcomes) if not has_returned]
    assert not failures, "\n".join(failures)
    return [value for _, value in outcomes]


def _run(bodies: Sequence[Body], limit: float) -> list[Outcome]:
    running = [_start(function, args) for function, args in bodies]
    deadline = time.monotonic() + limit
    return [_finish(pid, connection, stacks, deadline) for pid, connection, stacks in running]


def _start(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, Any, Any]:
    here, there = multiprocessing.Pipe(duplex=False)
    stacks = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read after the process has gone
    pid = os.fork()
    if pid:
        there.close()
        return pid, here, stacks
    try:
        here.close()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        faulthandler.register(signal.SIGUSR1, file=stacks)
        try:
            outcome = True, function(*args)
            pickle.dumps(outcome)
        except BaseException:
            outcome = False, traceback.format_exc()
        there.send(outcome)
    finally:
        os._exit(0)


def _finish(pid: int, connection: Any, stacks: Any, deadline: float) -> Outcome:
    try:
        if connection.poll(max(0.0, deadline - time.monotonic())):
            return connection.recv()  # type: ignore[no-any-return]
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)  # for the stacks
    except EOFError:
        pass
    finally:
        connection.close()
        os.kill(pid, signal.SIGKILL)  # ours until it is waited for
        _, status = os.waitpid(pid, 0)
        stacks.seek(0)
        text = stacks.read()
        stacks.close()
    return False, f"ended without a result, status {status}\n{text}"
