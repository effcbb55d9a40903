"""When is a key of the job's store written?  A thread waits for it, so that the agent need not ask again and again.

An agent waits for one key at a time: the verdict of its cycle, the next formation, the next entry of the log. The wait
costs the store one request. The result is a hint: the agent then reads the key itself, and it also looks now and then
without a hint. So a wait that is lost, with its connection or in a store that starts anew, costs time only."""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from resilience.adapters.store import wait
from resilience.errors import StoreError

CHUNK = 60.0  # seconds of one wait, after which the key is asked for anew
RETRY = 1.0  # seconds at least between two failures that wake the agent
INTERRUPT_EVERY = 0.05  # seconds between two looks for a signal; they cost the store nothing


class KeyWatch:
    """Waits for one key at a time, in threads with clients of their own. Its methods are for one thread."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        """connect: makes a client. Raises StoreError if the store is out of reach."""
        self._connect = connect
        self._lock = threading.Lock()
        self._key = ""  # what the agent waits for
        self._is_rung = False  # the key may be there
        self._is_closed = threading.Event()
        self._failed_at = float("-inf")
        self._idle: list[queue.SimpleQueue[str]] = []  # orders of threads that wait for nothing
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def fileno(self) -> int:
        """Readable once the key may be there."""
        return self._read

    @property
    def is_rung(self) -> bool:
        """Whether the key may be there."""
        return self._is_rung

    def has(self, key: str) -> bool:
        """Return True if `key` may be there. Otherwise it is waited for from now on, and no other key is."""
        with self._lock:
            if key == self._key and not self._is_rung:
                return False
            is_rung = key == self._key
            self._key, self._is_rung = "" if is_rung else key, False
            self._drain()
            if is_rung:
                return True
            orders = self._idle.pop() if self._idle else None
        if orders is None:
            orders = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(orders,), name="resilience watch", daemon=True).start()
        orders.put(key)
        return False

    def wait(self, key: str, limit: float, is_interrupted: Callable[[], bool]) -> bool:
        """Wait until `key` may be there, `limit` seconds at most. Return True if it may be. is_interrupted: True ends
        the wait."""
        deadline = time.monotonic() + limit
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        while not self.has(key):
            left = deadline - time.monotonic()
            if left <= 0 or is_interrupted():
                return False
            poll.poll(min(INTERRUPT_EVERY, left) * 1000)
        return True

    def close(self) -> None:
        """Wait for nothing any more. A thread that still waits ends after CHUNK, or with the process."""
        self._is_closed.set()
        with self._lock:
            self._key = ""
            for orders in self._idle:
                orders.put("")

    def _drain(self) -> None:
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass

    def _run(self, orders: queue.SimpleQueue[str]) -> None:
        client: Any = None
        while key := orders.get():
            try:
                client = client or self._connect()
                while not wait(client, key, CHUNK, CHUNK) and key == self._key:
                    pass
            except (StoreError, OSError):  # the agent looks itself now, and notices if the store is gone
                client = None
                self._is_closed.wait(max(0.0, self._failed_at + RETRY - time.monotonic()))
                self._failed_at = time.monotonic()
            with self._lock:
                if self._is_closed.is_set():
                    return
                self._idle.append(orders)
                if key == self._key:
                    self._is_rung = True
                    os.write(self._write, b"x")
