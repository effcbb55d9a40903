"""A backend for process groups on the CPU that behaves like NCCL where a restart depends on it.

* Collectives are asynchronous: a thread of the group works them off in order. Waiting for one blocks below
  Python, where no signal is heard, in a frame of torch.distributed.
* They exchange their data through files in the working directory: no cut connection frees a rank, only `abort`.
* `abort` takes `options.abort_s` seconds. Collectives under way fail when it begins, or when it ends.
* While a group of this process is being aborted, a new one is refused.
* A group that was aborted raises "NCCL communicator was aborted" at every use.

`register()` makes it available as backend "asynchronous". `diary` tells what happened to the groups of this
process, in order: (what, number of the group in this process)."""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "asynchronous"
LOOK_EVERY = 0.002  # seconds between two looks for the data of the other ranks


@dataclass
class Options:
    """How groups behave. hangs: numbers of the groups whose abort never returns; fails: whose abort raises.
    frees_first: collectives fail when the abort begins, else when it ends. refuses: as above, else new groups may
    be built at any time. before_end: called at the end of each abort with the group's number."""

    abort_s: float = 0.0
    hangs: Sequence[int] = ()
    fails: Sequence[int] = ()
    frees_first: bool = False
    refuses: bool = True
    before_end: Callable[[int], None] = field(default=lambda number: None)


options = Options()
diary: list[tuple[str, int]] = []
groups: list[Group] = []


def register() -> None:
    """Make the backend known to torch. Harmless if called again."""
    dist.Backend.register_backend(BACKEND, Group, devices=["cpu"])


class Work(dist.Work):  # type: ignore[misc]
    """A collective under way."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._future = future
        # A rank waits in C, so that its innermost Python frame is torch's own, as it is with NCCL. `next` takes the
        # timeout that C++ passes, and ignores it.
        wait = functools.partial(torch._C.Future.wait, future.then(_is_done))
        self.wait = functools.partial(next, iter(wait, None))

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class Group(dist.ProcessGroup):  # type: ignore[misc]
    """One communicator."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self.number = len(groups)
        self.is_aborting = False
        if options.refuses and any(group.is_aborting for group in groups):
            diary.append(("refused", self.number))
            raise dist.DistBackendError("NCCL error: unhandled system error, a communicator is being aborted")
        groups.append(self)
        diary.append(("built", self.number))
        if rank == 0:
            store.set("communicator", uuid.uuid4().hex)
        self._folder = Path(f"communicator-{store.get('communicator').decode()}")
        self._folder.mkdir(exist_ok=True)
        self._sequence = itertools.count()
        self._failure: BaseException | None = None
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], torch.futures.Future[Any]]] = queue.SimpleQueue()
        self.collectives = 0  # that were asked for
        self.is_waiting = threading.Event()  # a collective is under way
        threading.Thread(target=self._run, name=f"asynchronous-{self.number}", daemon=True).start()

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    @property
    def has_failed(self) -> bool:
        """Whether every use of the group raises from now on."""
        return self._failure is not None

    # -- the end --------------------------------------------------------------------------------

    def abort(self) -> None:
        diary.append(("abort began", self.number))
        self.is_aborting = True
        if options.frees_first:
            self._fail()
        if self.number in options.hangs:
            threading.Event().wait()
        time.sleep(options.abort_s)
        options.before_end(self.number)
        self._fail()
        self.is_aborting = False
        diary.append(("abort ended", self.number))
        if self.number in options.fails:
            raise dist.DistBackendError("NCCL error: unhandled cuda error")

    def shutdown(self) -> None:
        diary.append(("shut down while it was being aborted" if self.is_aborting else "shut down", self.number))

    def _fail(self) -> None:
        self._failure = dist.DistBackendError(f"NCCL communicator was aborted on rank {self._rank}.")

    # -- collectives ----------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return self._begin(lambda: self._all_reduce(tensors))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return self._begin(lambda: self._all_reduce(tensors))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        return self._begin(lambda: self._broadcast(tensors, opts.rootRank))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._begin(lambda: self._all_gather(outputs[0], inputs[0]))

    def barrier(self, opts: Any = None) -> Work:
        return self._begin(lambda: self._exchange(None))

    def _all_reduce(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        everybody = self._exchange([tensor.detach().clone() for tensor in tensors])
        with torch.no_grad():
            for number, tensor in enumerate(tensors):
                tensor.copy_(torch.stack([theirs[number] for theirs in everybody]).sum(0))
        return tensors

    def _broadcast(self, tensors: list[torch.Tensor], root: int) -> list[torch.Tensor]:
        everybody = self._exchange([tensor.detach().clone() for tensor in tensors] if self._rank == root else None)
        with torch.no_grad():
            for tensor, value in zip(tensors, everybody[root], strict=True):
                tensor.copy_(value)
        return tensors

    def _all_gather(self, outputs: list[torch.Tensor], mine: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            for output, value in zip(outputs, self._exchange(mine.detach().clone()), strict=True):
                output.copy_(value)
        return outputs

    # -- the thread -----------------------------------------------------------------------------

    def _begin(self, collective: Callable[[], Any]) -> Work:
        if self._failure is not None:
            raise self._failure
        begun: torch.futures.Future[Any] = torch.futures.Future()
        self._queue.put((collective, begun))
        self.collectives += 1
        return Work(begun.then(lambda outcome: _result(outcome.value())))

    def _run(self) -> None:
        while True:
            collective, begun = self._queue.get()
            self.is_waiting.set()
            try:
                result = collective()
            except BaseException as error:
                result = error
            self.is_waiting.clear()
            with contextlib.suppress(RuntimeError):  # whoever waits gets it
                begun.set_result(result)

    def _exchange(self, mine: Any) -> list[Any]:
        """Give this rank's data to the others and return everybody's, by rank."""
        number = next(self._sequence)
        self._give(number, mine)
        everybody = [self._take(number, rank) for rank in range(self._size)]
        if number > 1:  # everybody has taken it: they have given for the one after it
            self._path(number - 2, self._rank).unlink()
        return everybody

    def _give(self, number: int, data: Any) -> None:
        path = self._path(number, self._rank)
        path.with_suffix(".part").write_bytes(pickle.dumps(data))
        path.with_suffix(".part").rename(path)

    def _take(self, number: int, rank: int) -> Any:
        path = self._path(number, rank)
        while self._failure is None:
            if path.exists():
                return pickle.loads(path.read_bytes())
            time.sleep(LOOK_EVERY)
        raise self._failure

    def _path(self, number: int, rank: int) -> Path:
        return self._folder / f"{number}-{rank}"


def _is_done(outcome: torch.futures.Future[Any]) -> bool:
    """Raise the collective's error, if it failed."""
    outcome.value()
    return True


def _result(value: Any) -> Any:
    """Pass on a collective's result; an error is raised, which makes it the error of the future."""
    if isinstance(value, BaseException):
        raise value
    return value
