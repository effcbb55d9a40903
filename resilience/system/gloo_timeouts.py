"""How is a rank freed that waits for a connection whose end gloo does not read?

When a collective fails, gloo frees its buffers. If a message for such a buffer arrives later, gloo reads nothing more
from that connection (`Pair::prepareRead` in gloo/transport/tcp/pair.cc), so a cut is not noticed there, and another
collective that waits for this peer never ends. Its thread also uses a whole processor.

A receive that times out closes all connections of its group and ends all waits for them. So `begin` lets one time out
in each group. Only for groups that are given up, and after they were cut: the copies of `collectives` keep the
connections open, so that no peer sees an end before its own cut."""

from __future__ import annotations

import contextlib
import sys
import threading
from datetime import timedelta
from typing import Any

from resilience.system.group_aborts import c10d

TAG = 0x7EA5  # any: nobody sends to a group that is given up
SOON = timedelta(milliseconds=1)

_running: threading.Thread | None = None
_count = 0


def begin() -> None:
    """Let a receive time out in each gloo group of this process. Returns at once: a group that is still being built
    may keep its thread waiting. Does nothing while such a thread runs. Never raises; one thread at a time."""
    global _running
    module = c10d()
    if module is None or (_running is not None and _running.is_alive()):
        return
    _running = threading.Thread(
        target=_time_out_all, args=(list(module._world.pg_map),), name="resilience-time-out", daemon=True
    )
    with contextlib.suppress(RuntimeError):  # this host or process has no thread left
        _running.start()


def count() -> int:
    """Return how many groups still had an open connection, and were closed this way, since the last call."""
    global _count
    closed, _count = _count, 0
    return closed


def _time_out_all(groups: list[Any]) -> None:
    while groups:
        with contextlib.suppress(Exception):  # a thread's edge: a group may have no gloo backend, or be half built
            _time_out(groups.pop())


def _time_out(group: Any) -> None:
    global _count
    torch = sys.modules["torch"]
    backend = group._get_backend(torch.device("cpu"))
    if backend.name() != "gloo":
        return
    for peer in range(backend.size()):
        if peer == backend.rank():
            continue
        try:
            work = backend.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, TAG)
        except RuntimeError:  # this connection is closed
            continue
        _count += 1  # first: once it has timed out, the main thread is free
        work.wait(SOON)  # raises
