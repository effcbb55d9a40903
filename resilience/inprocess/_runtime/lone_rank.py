"""How do other nodes learn that a rank lives whose monitor does not?  It raises a counter of its own in the store.

Only monitors raise the counter of their node. If the only monitor of a node is gone or stopped, the node falls silent
although its rank works on. The node that watches it then looks at the rank's own counter, and at the next node of the
ring too (`core.peer_liveness`), so this rank has to watch no other node.

The thread and its connection exist from then on until the call ends. Its waits are bounded by that end, which closes
the connection. A lost store is noticed by the rank's other threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from resilience.core.restart import Add
from resilience.inprocess._runtime.supervision import BEATS, alone_key
from resilience.system.open_sockets import Connection
from resilience.system.store import execute

END_LIMIT = 1.0  # seconds that the call's end waits for the thread


class LoneRank:
    """Shows that a rank lives, once `start` was called."""

    def __init__(
        self,
        connect: Callable[[], tuple[Any, list[Connection]]],
        prefix: str,
        initial_rank: int,
        heartbeat_timeout: float,
        done: threading.Event,
    ) -> None:
        """connect: return one more client of the store, and its connections. prefix: of the call's keys. done: set once
        the call is over."""
        self._connect = connect
        self._prefix = prefix
        self._key = alone_key(initial_rank)
        self._beat_every = heartbeat_timeout / BEATS
        self._connections: list[Connection] = []
        self._done = done
        self._thread = threading.Thread(target=self._run, name="resilience-lone-rank", daemon=True)

    def start(self) -> None:
        """Begin. Repeating it changes nothing, unless no thread was left the last time."""
        if self._thread.ident is None:
            with contextlib.suppress(RuntimeError):
                self._thread.start()

    def end(self) -> None:
        """End the connection, and so the thread, once `done` is set. Waits for a bounded time."""
        for connection in self._connections:
            connection.shut_down()
        if self._thread.ident is not None:
            self._thread.join(END_LIMIT)

    def _run(self) -> None:
        while not self._done.is_set():
            with contextlib.suppress(Exception):  # whatever a store raises; the next round connects anew
                self._beat()
            self._done.wait(self._beat_every)

    def _beat(self) -> None:
        client, self._connections = self._connect()
        store = dist.PrefixStore(self._prefix, client)
        while not self._done.is_set():
            execute(Add(self._key, 1), store)
            self._done.wait(self._beat_every)
