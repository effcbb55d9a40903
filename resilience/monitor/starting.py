"""Starts the program of a rank monitor and holds the other end of its line.

Executed, never forked: the agent has threads. It gets the module path of this process and imports neither
torch nor the site's extras. The listening socket stays open here, so that workers reach the next
monitor under the same path, and wait for it, where one is lost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import resilience
from resilience.adapters.channel import ChannelClosed, close_all, pair
from resilience.adapters.processes import job_signals_blocked
from resilience.errors import DecodeError
from resilience.monitor import messages

PROGRAM = "resilience.monitor.program"


class MonitorProcess:
    """A monitor's process, and the line to it."""

    def __init__(self, listener: socket.socket) -> None:
        """Start it. Raises: OSError."""
        self._line, theirs = pair()
        fds = (theirs.fileno(), listener.fileno())
        try:
            with job_signals_blocked():
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-m", PROGRAM, *map(str, fds)],
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd="/",  # no module of a user's working directory comes first
                    env=lean_environment(),
                    start_new_session=True,
                )
        except OSError:
            self._line.close()
            raise
        finally:
            theirs.close()
        self.send(messages.Open(os.getpid()))

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Of the line: readable when there is something to hear, or when the monitor is gone."""
        return self._line.fileno()

    def send(self, message: messages.FromAgent, fds: Sequence[int] = ()) -> bool:
        """Tell it something; False if it does not read, or is gone."""
        return self._line.send(messages.encode(message), fds)

    def hear(self, wait: float) -> tuple[messages.ToAgent, list[int]] | None:
        """Return what it says next, with the descriptors that come along, None if it says nothing.

        Raises: ChannelClosed."""
        received = self._line.receive_with_fds(wait)
        if received is None:
            return None
        data, fds = received
        try:
            return messages.decode_for_agent(data), fds
        except DecodeError as error:  # what says that is no monitor of ours
            close_all(fds)
            raise ChannelClosed(str(error)) from error

    def has_ended(self, wait: float = 0.0) -> bool:
        """Whether the process is gone, at the latest after `wait` seconds."""
        try:
            self._process.wait(wait)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it at once, also where it is stopped."""
        self._process.kill()
        self.has_ended(1.0)  # one that the kernel holds on to is left to it
        self._line.close()

    def end(self, limit: float) -> None:
        """Let it finish, kill it after `limit` seconds."""
        self.send(messages.Leave())
        self.has_ended(limit)
        self.kill()


def lean_environment() -> dict[str, str]:
    """Return the environment of a program of ours that is started with -S: it finds this process's modules."""
    home = str(Path(resilience.__file__).resolve().parent.parent)
    paths = [home, *(os.path.abspath(path) for path in sys.path if path)]
    environment = os.environ.copy()  # passed on, not read
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environment["MALLOC_ARENA_MAX"] = "1"  # a second arena for its one thread would cost a megabyte
    return environment
