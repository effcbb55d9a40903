"""When is a key of the job's store written?  A thread waits for it, so the agent does not have to poll.

An agent waits for one key at a time: the verdict of its cycle, the next membership, the next log entry. The wait
costs the store one request. The result is only a hint: the agent then reads the key itself, and it also checks now and
then without a hint. So a lost wait (connection lost, store restarted) costs time only."""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from resilience.errors import LaunchError, StoreError
from resilience.launcher.rendezvous.job_store import CUT_LIMIT
from resilience.system import patience
from resilience.system.open_sockets import Connection
from resilience.system.store import wait

WAIT_TCP = 86400.0  # seconds of one wait: for each that times out, torch's client prints two lines at the terminal
WAIT_OTHER = 60.0  # the same for other clients, such as etcd's, which print nothing
RETRY = 1.0  # minimum seconds between two failures that wake the agent
INTERRUPT_EVERY = 0.05  # seconds between two polls for a signal; they cost the store nothing
WOKEN_LIMIT = 0.2  # seconds in which a thread ends whose key has been written


class KeyWatch:
    """Waits for one key at a time, in threads with their own clients. Call its methods from one thread.

    A thread goes on waiting for a key that the agent no longer needs: sooner or later each of these keys is written."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        """connect: creates a client; raises StoreError if the store is unreachable. Raises: LaunchError."""
        self._connect = connect
        self._lock = threading.Lock()
        self._key = ""  # the key that the agent waits for
        self._may_exist = False  # the key may exist
        self._is_closed = threading.Event()
        self._failed_at = float("-inf")
        self._idle: list[queue.SimpleQueue[str]] = []  # order queues of idle threads
        self._connections: dict[threading.Thread, list[Connection]] = {}  # of each thread with a client
        try:
            self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise LaunchError(f"no key can be waited for: {error}; this host lacks the resources for it") from error

    def fileno(self) -> int:
        """Return a descriptor that is readable when the key may exist."""
        return self._read

    @property
    def may_exist(self) -> bool:
        """Return True if the key may exist."""
        return self._may_exist

    def has(self, key: str) -> bool:
        """Return True if `key` may exist. Otherwise wait for this key from now on, and for no other."""
        with self._lock:
            if key == self._key and not self._may_exist:
                return False
            may_exist = key == self._key
            self._key, self._may_exist = "" if may_exist else key, False
            self._drain()
            if may_exist:
                return True
            orders = self._idle.pop() if self._idle else None
        if orders is None:
            orders = queue.SimpleQueue()
            try:
                threading.Thread(target=self._run, args=(orders,), name="resilience watch", daemon=True).start()
            except RuntimeError:  # this host or process has no thread left: the next call tries again
                with self._lock:
                    self._key = ""
                return False
        orders.put(key)
        return False

    def wait(self, key: str, limit: float, is_interrupted: Callable[[], bool]) -> bool:
        """Wait until `key` may exist, `limit` seconds at most. Return True if it may. is_interrupted: True ends the
        wait."""
        deadline = time.monotonic() + limit
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        while not self.has(key):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or is_interrupted():
                return False
            poll.poll(min(INTERRUPT_EVERY, remaining) * 1000)
        return True

    def close(self, ends_store: bool = False) -> None:
        """Stop waiting. A thread inside a wait ends with the process.

        ends_store: the store ends before this process does, so end such threads here. A wait that fails in C++ while
        the interpreter ends would abort the process."""
        self._is_closed.set()
        with self._lock:
            self._key = ""
            for orders in self._idle:
                orders.put("")
        if not ends_store:
            return
        with self._lock:
            waiting = dict(self._connections)
        _join(waiting, WOKEN_LIMIT)
        for thread, connections in waiting.items():
            if thread.is_alive():
                for connection in connections:
                    connection.shut_down()
        _join(waiting, CUT_LIMIT)

    def _drain(self) -> None:
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass

    def _run(self, orders: queue.SimpleQueue[str]) -> None:
        client: Any = None
        chunk = WAIT_OTHER
        while key := orders.get():
            try:
                if client is None:
                    client, connections = patience.connect(self._connect)
                    with self._lock:
                        self._connections[threading.current_thread()] = connections
                    if self._is_closed.is_set():
                        return
                    chunk = WAIT_TCP if connections else WAIT_OTHER
                while not wait(client, key, chunk, chunk) and key == self._key:
                    pass
            except (StoreError, OSError):  # the agent now reads the key itself, and notices if the store is gone
                client = None
                self._is_closed.wait(max(0.0, self._failed_at + RETRY - time.monotonic()))
                self._failed_at = time.monotonic()
            with self._lock:
                if self._is_closed.is_set():
                    return
                self._idle.append(orders)
                if key == self._key:
                    self._may_exist = True
                    os.write(self._write, b"x")


def _join(threads: Iterable[threading.Thread], limit: float) -> None:
    """Wait until these threads have ended, `limit` seconds at most."""
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
