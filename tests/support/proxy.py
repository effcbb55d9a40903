"""A TCP proxy that fails as networks do: it delays, swallows or resets what passes.

Each connection has two pumps, which look at the mode for every piece of data. So a mode that changes also holds
for connections that are there already, except that what was swallowed is gone, and the connection with it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

Mode = Literal["pass", "delay", "swallow", "reset"]
LOOK = 0.05  # seconds between looks whether the mode has changed
NO_LINGER = struct.pack("ii", 1, 0)  # closing sends a reset


class Proxy:
    """Listens on a port, and passes on to a target. delay: seconds for each direction, in mode delay.

    swallow: both ends stay connected, what they say is taken and goes nowhere: a half-open peer, whichever end asks.
    reset: connections end with a reset, new ones at once."""

    def __init__(self, target: tuple[str, int], within: Callable[[Callable[[], None]], None] | None = None) -> None:
        """within: runs a function in the network where the proxy is to be, this one's by default."""
        self.mode: Mode = "pass"
        self.delay = 0.0
        self.passed = 0  # pieces of data, in both directions
        self._target = target
        self._within = within or (lambda body: body())
        self._stop = threading.Event()
        self._lines: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._within(self._listen)
        self.port = int(self._listener.getsockname()[1])
        self._start(self._accept)

    def set(self, mode: Mode, delay: float = 0.0) -> None:
        """Be so from now on."""
        self.delay, self.mode = delay, mode

    def await_passed(self, count: int, limit: float = 60.0) -> None:
        """Wait until so many more pieces have passed."""
        deadline, before = time.monotonic() + limit, self.passed
        while self.passed < before + count:
            assert time.monotonic() < deadline, f"{self.passed - before} pieces passed within {limit:g} s, not {count}"
            time.sleep(LOOK)

    def close(self) -> None:
        """End all connections, and listen no more."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for line in (self._listener, *self._lines):
            line.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self) -> None:
        self._listener = socket.create_server(("", 0))
        self._listener.settimeout(LOOK)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            self._lines.append(near)
            if self.mode == "reset":
                _reset(near)
                continue
            with contextlib.suppress(OSError):
                self._within(partial(self._connect, near))

    def _connect(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._target, timeout=10.0)
        except OSError:
            _reset(near)
            raise
        self._lines.append(far)
        for line in (near, far):
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.settimeout(LOOK)
        self._start(self._pump, near, far)
        self._start(self._pump, far, near)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        """Pass on what comes; an end is passed on too, but where everything is swallowed."""
        while not self._stop.is_set():
            if self.mode == "reset":
                _reset(source)
                _reset(sink)
                return
            try:
                data = source.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                data = b""
            if self.mode == "swallow":
                if not data:
                    self._stop.wait(LOOK)
                continue
            if self.mode == "delay":
                time.sleep(self.delay)
            try:
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
                self.passed += 1
            except OSError:
                return


def _reset(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        line.close()
