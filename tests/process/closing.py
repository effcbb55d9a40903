"""Functions that give back what their program took before the call: what the ranks of `test_monitor_starts` run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess.store import TCPStore

HELD = 1280 << 20  # bytes; more than a forked monitor may keep
LIMIT = 30.0  # seconds for a helper to read the end of its input


def close_what_was_open_before() -> list[str]:
    """Answers what other processes notice when the function has closed a server, a lock and a helper's input."""
    read_all = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    lock = os.open("lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)

    @Wrapper()
    def function(helper: subprocess.Popen[bytes], call: CallWrapper | None = None) -> list[str]:
        noticed = []
        server.close()
        os.close(lock)
        assert helper.stdin is not None
        helper.stdin.close()
        with socket.socket() as client:
            noticed += [f"client: {os.strerror(client.connect_ex(address))}"]
        with Path("lock").open() as other, contextlib.suppress(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            noticed += ["lock: free"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            noticed += [f"helper: exit code {helper.wait(LIMIT)}"]
        return noticed

    with subprocess.Popen(read_all, stdin=subprocess.PIPE) as helper:
        try:
            return function(helper)
        finally:
            helper.kill()


def free_what_was_loaded_before(are_hooks_sent: bool) -> int:
    """Answers how many bytes the monitor holds when the function has freed HELD bytes that its program held before the
    call. are_hooks_sent: a monitor that is a fresh process can get the hooks."""
    hooks: dict[str, Any] = {} if are_hooks_sent else {"store_factory": lambda **named: TCPStore(**named)}
    loaded = [bytearray(b"\1") * HELD]

    @Wrapper(**hooks)
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        loaded.clear()
        status = Path(f"/proc/{call._session._monitor.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) << 10

    return function()
