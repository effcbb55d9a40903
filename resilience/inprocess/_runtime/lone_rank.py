"""How do other nodes learn that a rank lives whose monitor does not?  It raises a counter of its own in the store.

Only monitors raise the counter of their node. If the only monitor of a node is gone, stopped or has failed, the node
falls silent although its rank works on. The node that watches it then looks at the rank's own counter, and at the next
node of the ring too (`core.peer_liveness`), so this rank has to watch no other node.

While another monitor raises the node's counter, the rank's own one is 0. If the whole node is lost, its watcher must
not take this rank for one that lives.

The thread and its connection exist from then on until the call ends. Only that bounds its waits, so `end` cuts the
connection, also one that is being opened. A lost store is noticed by the rank's other threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from resilience.core.restart import Add, Set
from resilience.errors import error_in_words
from resilience.facts import events
from resilience.inprocess._runtime.supervision import BEATS, alone_key, own_beat_key
from resilience.system import patience
from resilience.system.open_sockets import Connection, Opening
from resilience.system.store import execute

STILL = 2  # consecutive looks that find the node's counter unchanged; its leader may be late for one
ATTEMPT = timedelta(seconds=5)  # to connect; torch goes on that long after a cut
END_LIMIT = 6.0  # seconds that the call's end waits for the thread
CUT_AGAIN = 0.05  # seconds; a connection may be opened just after a cut


class LoneRank:
    """Shows that a rank lives, once `start` was called."""

    def __init__(
        self,
        base: Any,
        prefix: str,
        node: str,
        initial_rank: int,
        heartbeat_timeout: float,
        done: threading.Event,
        emit: Callable[[events.Event], None],
    ) -> None:
        """base: a client of the call's store. prefix: of the call's keys. done: set once the call is over."""
        self._base = base
        self._prefix = prefix
        self._key = alone_key(initial_rank)
        self._nodes_key = own_beat_key(node)
        self._is_shown = False
        self._has_failed = False
        self._beat_every = heartbeat_timeout / BEATS
        self._connections: Callable[[], Sequence[Connection]] = tuple
        self._done = done
        self._emit = emit
        self._thread = threading.Thread(target=self._run, name="resilience-lone-rank", daemon=True)

    def start(self) -> None:
        """Begin. Repeating it changes nothing, unless no thread was left the last time."""
        if self._thread.ident is None and not self._done.is_set():
            with contextlib.suppress(RuntimeError):
                self._thread.start()

    def end(self, limit: float = END_LIMIT) -> None:
        """End the connection, and so the thread, once `done` is set. Waits at most `limit` seconds for that."""
        deadline = time.monotonic() + limit
        while self._thread.is_alive():
            for connection in self._connections():
                connection.shut_down()
            if (left := deadline - time.monotonic()) <= 0:
                break
            self._thread.join(min(left, CUT_AGAIN))
        self._base = None  # once the call is over, no rank is connected to the store

    def _run(self) -> None:
        while not self._done.is_set():
            try:
                self._beat()
            except Exception as error:  # whatever a store raises; the next round connects anew
                self._connections = tuple
                self._note_failure(error)
            self._done.wait(self._beat_every)

    def _note_failure(self, error: Exception) -> None:
        """Record it once: the other nodes may take this rank for lost."""
        if not (self._has_failed or self._done.is_set()):
            self._has_failed = True
            self._emit(events.HookFailed("sign of life", error_in_words(error)))

    def _connect(self) -> Any:
        server = patience.server_of(self._base)
        if server is not None:
            self._connections = Opening(server[1]).connections
            if isinstance(self._base, dist.TCPStore):
                return dist.TCPStore(*server, wait_for_workers=False, timeout=ATTEMPT)
        # Not the factory: in an iteration, the variables that it reads name the store of that iteration.
        return self._base.clone()

    def _beat(self) -> None:
        client, opened = patience.connect(self._connect)
        self._connections = lambda: opened  # no later ones to the same port, which are the function's
        if self._done.is_set():  # perhaps it was not connected yet when `end` cut it
            return
        store = dist.PrefixStore(self._prefix, client)
        count, still = execute(Add(self._nodes_key, 0), store), 0
        while not self._done.wait(self._beat_every):
            present = execute(Add(self._nodes_key, 0), store)
            count, still = present, still + 1 if present == count else 0
            if still >= STILL:
                self._is_shown = True
                execute(Add(self._key, 1), store)
                self._has_failed = False
            elif self._is_shown:  # a monitor acts again
                execute(Set(self._key, "0"), store)
                self._is_shown = False
