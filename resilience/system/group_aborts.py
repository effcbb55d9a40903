"""How do the process groups of accelerators end when an iteration is interrupted?

A cut connection does not free their collectives. torch has to abort the group, which takes time (NCCL: 0.5 s and more)
and may hang. Each group is aborted in a thread of its own, all at the same time. While an abort runs, no group may be
built or shut down, so the caller waits before it continues. An abort that exceeds its limit is given up: its thread
continues and keeps the group.

Imports no torch by itself: if torch.distributed was never imported, there is nothing to abort."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Literal

import msgspec

from resilience.errors import error_in_words

_UNABORTABLE = frozenset({"gloo", "mpi", "fake", "undefined"})


class GroupAbort(msgspec.Struct, frozen=True):
    """The result of one accelerator group's abort. duration: seconds so far, if it timed out."""

    group: str
    backend: str
    duration: float
    outcome: Literal["aborted", "failed", "timed out"]
    error: str = ""


_aborts: list[_Abort] = []  # one for each group of this iteration that an abort has reached
_left: list[_Abort] = []  # aborts of earlier iterations that were given up, and may still run


def begin() -> None:
    """Begin to abort each live accelerator group that no abort has reached yet. Returns at once. Never raises.

    All groups at the same time, each in a daemon thread: NCCL's abort can wait for the abort of another communicator
    (https://github.com/pytorch/pytorch/issues/119797)."""
    module = c10d()
    if module is None:
        return
    known_groups = [abort.group for abort in _aborts]
    new_groups = [
        group for group in list(module._world.pg_map) if not any(group is known_group for known_group in known_groups)
    ]
    # Look up all groups before the first abort: it frees the main thread, which may destroy the others.
    described = [(group, str(module._world.pg_names.get(group, "")), backends(module, group)) for group in new_groups]
    for group, name, kinds in described:
        if not kinds <= _UNABORTABLE:
            _aborts.append(_Abort(group, name, ",".join(sorted(kinds - _UNABORTABLE))))


def abort_all(limit: float) -> None:
    """Abort every live accelerator group. Wait for each at most `limit` seconds from the start of its abort.

    An abort that takes longer continues in its thread, and its group is left behind. Never raises."""
    begin()
    for abort in _aborts:
        abort.wait(limit)


def last() -> list[GroupAbort]:
    """Return each abort that has been waited for since the last call."""
    finished = [abort for abort in _aborts if abort.done is not None and not abort.is_told]
    for abort in finished:
        abort.is_told = True
    return [abort.done for abort in finished if abort.done is not None]


def are_running() -> bool:
    """Return True while an abort runs that has not been given up."""
    return any(abort.done is None and abort.thread.is_alive() for abort in _aborts)


def forget() -> frozenset[int]:
    """Forget the aborts of this iteration, whose groups are about to be dropped. Return the ids of groups whose abort
    still runs: they must not be shut down."""
    running = [abort for abort in _aborts if abort.thread.is_alive()]
    _left[:] = [abort for abort in _left if abort.thread.is_alive()] + running
    _aborts.clear()
    return frozenset(id(abort.group) for abort in running)


def has_run_for(limit: float) -> bool:
    """Return True while an abort of an earlier iteration still runs that began `limit` seconds ago or earlier: it will
    hardly end, and a backend may refuse new groups until it does."""
    now = time.monotonic()
    return any(abort.thread.is_alive() and now - abort.began >= limit for abort in _left)


def c10d() -> Any:
    """Return torch.distributed's implementation if it is imported and built in, else None."""
    return sys.modules.get("torch.distributed.distributed_c10d")


def backends(module: Any, group: Any) -> frozenset[str]:
    """Return the names of a group's backends. A configuration reads `cpu:gloo,cuda:nccl`."""
    # A group whose registration was interrupted has no configuration yet; pg_map is filled first.
    config = str(module._world.pg_backend_config.get(group) or module._world.pg_map.get(group, ("",))[0])
    return frozenset(part.rpartition(":")[2].strip().lower() for part in config.split(",") if part)


class _Abort:
    """The abort of one group, in its own thread."""

    def __init__(self, group: Any, name: str, backend: str) -> None:
        self.group = group
        self.done: GroupAbort | None = None  # set once it has been waited for
        self.is_told = False
        self._name = name
        self._backend = backend
        self.began = time.monotonic()
        self._ended = self.began
        self._error = ""
        self.thread = threading.Thread(target=self._run, name="resilience-abort", daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:  # this host or process has no thread left
            self.done = GroupAbort(name, backend, 0.0, "failed", error_in_words(error))

    def wait(self, limit: float) -> None:
        """Wait until the abort has ended, at most until `limit` seconds after its start. `done` has the result."""
        if self.done is not None:
            return
        self.thread.join(max(0.0, self.began + limit - time.monotonic()))
        if self.thread.is_alive():
            self.done = GroupAbort(self._name, self._backend, time.monotonic() - self.began, "timed out")
        else:
            outcome: Literal["aborted", "failed"] = "failed" if self._error else "aborted"
            self.done = GroupAbort(self._name, self._backend, self._ended - self.began, outcome, self._error)

    def _run(self) -> None:
        try:
            _abort(self.group)
        except Exception as error:  # a thread's edge; torch and its backends raise anything
            self._error = error_in_words(error)
        self._ended = time.monotonic()


def _abort(group: Any) -> None:
    if hasattr(group, "abort"):
        group.abort()
        return
    for device in group._device_types:  # a group without it: only the backends have it
        backend = group._get_backend(device)
        if hasattr(backend, "abort"):
            backend.abort()
