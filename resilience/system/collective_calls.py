"""Which collectives does this rank enter?  Notes the calls of torch's process groups, for the rank's monitor.

The methods of torch's ProcessGroup and `Work.wait` are wrapped, because every way to call a collective from Python
uses them: functions of `torch.distributed`, however they were imported, FSDP2, pipelines. For each call a ring records
the group, the number of the call in it, the operation, and the times of entry and exit. No tensor, group or Work is
kept alive. A call costs less than 3 µs (`python -m tests.benchmarks.bench_page`); RESILIENCE_COLLECTIVES=0 disables
it. `flight_recorder` covers collectives that C++ starts by itself, as DDP's reducer does.

A group is identified by its name in torch, which is the same on all ranks, and by how often this iteration has used the
name. A failure in here never reaches the call: the ring then lacks it. Stacks leave out the frames of this module."""

from __future__ import annotations

import sys
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from resilience.core import wait_for
from resilience.system import environment, flight_recorder

_COLLECTIVES = {
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "monitored_barrier": "monitored_barrier",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "scatter": "scatter",
}
_TRANSFERS = {"send": "send", "recv": "recv"}
_MOST_OPEN = 256  # calls whose end is awaited; the ring holds no more


class Ring(Protocol):
    """The place where calls are noted: the rank's side of its page."""

    def collective_entered(self, group: int, sequence: int, operation: str, members: int) -> int: ...

    def collective_left(self, token: int) -> None: ...


class _Group:
    """A process group: its ranks, and how many collectives this rank has entered in it."""

    def __init__(self, group: Any, use: int) -> None:
        import torch.distributed as dist

        self.name = f"{group.group_name}/{use}"
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.rank: int = group.rank()
        self.number = zlib.crc32(self.name.encode())
        self.members = wait_for.pack(self.ranks)
        self.sequence = 0
        self.transfers: dict[tuple[int, int], _Transfers] = {}


class _Transfers:
    """The transfers from one rank to another one."""

    def __init__(self, name: str, source: int, target: int) -> None:
        self.number = zlib.crc32(f"{name}/{source}>{target}".encode())
        self.members = wait_for.pack(sorted((source, target)), is_transfer=True)
        self.sequence = 0


_ring: Ring | None = None
_since_ns = 0  # UTC; when the iteration began
_groups: dict[int, tuple[weakref.ref[Any], _Group]] = {}
_uses: Counter[str] = Counter()
_open: dict[int, int] = {}  # calls that have not ended, by the identity of their Work
_originals: list[tuple[type, str, Any]] = []


def note_in(ring: Ring | None, kinds: Sequence[tuple[type, type]] = ()) -> None:
    """Note calls in this ring from now on, or nowhere if it is None. Main thread.

    Wraps the methods if torch.distributed is already imported; otherwise call `wrap` later. kinds: classes like
    ProcessGroup and Work, instead of torch's."""
    global _ring
    _ring = ring if environment.notes_collectives() else None
    begin()
    if _ring is None:
        _restore()
    else:
        wrap(kinds)


def wrap(kinds: Sequence[tuple[type, type]] = ()) -> None:
    """Wrap the methods if torch.distributed is imported and they are not wrapped yet. Does nothing without a ring."""
    if _ring is None or _originals:
        return
    c10d: Any = getattr(sys.modules.get("torch._C"), "_distributed_c10d", None)
    if not kinds and hasattr(c10d, "ProcessGroup"):
        kinds = [(c10d.ProcessGroup, c10d.Work)]
    for groups, works in kinds:
        for name, operation in _COLLECTIVES.items():
            _replace(groups, name, operation, _enter)
        for name, operation in _TRANSFERS.items():
            _replace(groups, name, operation, _enter_transfer)
        _replace_wait(works)


def begin() -> None:
    """Begin an iteration: count groups from 0 again, so that all ranks count alike."""
    global _since_ns
    _since_ns = time.time_ns()
    _groups.clear()
    _uses.clear()
    _open.clear()


def note_recorded() -> None:
    """Add to the ring the last collectives of each group from torch's flight recorder. Any thread."""
    ring = _ring
    if ring is None:
        return
    for recorded in flight_recorder.last(_since_ns):
        group = zlib.crc32(f"recorder/{recorded.group}".encode())
        members = wait_for.pack(recorded.ranks, is_recorded=True)
        for sequence, operation, is_done in recorded.calls:
            token = ring.collective_entered(group, sequence, operation, members)
            if is_done:
                ring.collective_left(token)


def _replace(kind: type, name: str, operation: str, enter: Callable[[Any, str, Sequence[Any]], int]) -> None:
    original = kind.__dict__.get(name)
    if original is None:
        return

    def call(group: Any, *args: Any, **named: Any) -> Any:
        if _ring is None:
            return original(group, *args, **named)
        token = None
        try:
            token = enter(group, operation, args)
        except Exception:  # an edge: an error in the noting must not fail the collective
            pass
        try:
            work = original(group, *args, **named)
        except BaseException:
            _leave(token)
            raise
        if work is None:
            _leave(token)
        elif token is not None:
            if len(_open) >= _MOST_OPEN:
                _open.clear()
            _open[id(work)] = token
        return work

    call.__name__ = name
    _originals.append((kind, name, original))
    setattr(kind, name, call)


def _replace_wait(kind: type) -> None:
    original = kind.__dict__["wait"]

    def wait(work: Any, *args: Any, **named: Any) -> Any:
        try:
            return original(work, *args, **named)
        finally:
            _leave(_open.pop(id(work), None))

    _originals.append((kind, "wait", original))
    setattr(kind, "wait", wait)  # noqa: B010  no plain assignment to a method


def _restore() -> None:
    for kind, name, original in _originals:
        setattr(kind, name, original)
    _originals.clear()


def _enter(group: Any, operation: str, args: Sequence[Any]) -> int:
    entry = _group_entry(group)
    entry.sequence = sequence = entry.sequence + 1
    assert _ring is not None
    return _ring.collective_entered(entry.number, sequence, operation, entry.members)


def _enter_transfer(group: Any, operation: str, args: Sequence[Any]) -> int:
    entry = _group_entry(group)
    pair = (entry.rank, args[1]) if operation == "send" else (args[1], entry.rank)
    transfers = entry.transfers.get(pair)
    if transfers is None:
        source, target = (entry.ranks[rank] for rank in pair)
        transfers = entry.transfers[pair] = _Transfers(entry.name, source, target)
    transfers.sequence = sequence = transfers.sequence + 1
    assert _ring is not None
    return _ring.collective_entered(transfers.number, sequence, "transfer", transfers.members)


def _group_entry(group: Any) -> _Group:
    cached = _groups.get(id(group))
    if cached is not None and cached[0]() is group:
        return cached[1]
    name = group.group_name
    entry = _Group(group, _uses[name])
    _uses[name] += 1
    _groups[id(group)] = weakref.ref(group), entry
    return entry


def _leave(token: int | None) -> None:
    ring = _ring
    if ring is not None and token is not None:
        ring.collective_left(token)
