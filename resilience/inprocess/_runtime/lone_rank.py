"""How do other nodes learn that a rank lives whose monitor does not?  It raises a counter of its own in the store.

Only monitors raise the counter of their node. If the only monitor of a node is gone, stopped or has failed, the node
falls silent although its rank works on. The node that watches it then looks at the rank's own counter, and at the next
node of the ring too (`core.peer_liveness`), so this rank has to watch no other node.

While another monitor raises the node's counter, the rank's own one is 0. If the whole node is lost, its watcher must
not take this rank for one that lives.

The thread and its connection exist from then on until the call ends. Its waits are bounded by that end, which closes
the connection. A lost store is noticed by the rank's other threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from resilience.core.restart import Add, Set
from resilience.inprocess._runtime.supervision import BEATS, alone_key, own_beat_key
from resilience.system.open_sockets import Connection
from resilience.system.store import execute

STILL = 2  # consecutive looks that find the node's counter unchanged; its leader may be late for one
END_LIMIT = 1.0  # seconds that the call's end waits for the thread


class LoneRank:
    """Shows that a rank lives, once `start` was called."""

    def __init__(
        self,
        connect: Callable[[], tuple[Any, list[Connection]]],
        prefix: str,
        node: str,
        initial_rank: int,
        heartbeat_timeout: float,
        done: threading.Event,
    ) -> None:
        """connect: return one more client of the store, and its connections. prefix: of the call's keys. done: set once
        the call is over."""
        self._connect = connect
        self._prefix = prefix
        self._key = alone_key(initial_rank)
        self._nodes_key = own_beat_key(node)
        self._is_shown = False
        self._beat_every = heartbeat_timeout / BEATS
        self._connections: list[Connection] = []
        self._done = done
        self._thread = threading.Thread(target=self._run, name="resilience-lone-rank", daemon=True)

    def start(self) -> None:
        """Begin. Repeating it changes nothing, unless no thread was left the last time."""
        if self._thread.ident is None and not self._done.is_set():
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
        count, still = execute(Add(self._nodes_key, 0), store), 0
        while not self._done.wait(self._beat_every):
            present = execute(Add(self._nodes_key, 0), store)
            count, still = present, still + 1 if present == count else 0
            if still >= STILL:
                self._is_shown = True
                execute(Add(self._key, 1), store)
            elif self._is_shown:  # a monitor acts again
                execute(Set(self._key, "0"), store)
                self._is_shown = False
