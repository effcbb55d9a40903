"""Starts the program of a rank monitor, and holds the agent's end of the channel to it.

The monitor is executed, never forked, because the agent has threads. It gets this process's module path and imports
neither torch nor the site's packages. The listening socket stays open here. If a monitor is lost, workers wait for the
next one and reach it under the same path."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path

import resilience
from resilience.errors import DecodeError
from resilience.monitor import messages
from resilience.system.channel import ChannelClosed, close_all, pair
from resilience.system.processes import job_signals_blocked

PROGRAM = "resilience.monitor.program"
# Our programs start here: `-m` looks for modules in the working directory first, and any other folder may have a user's
# `queue.py`. A container's is often "/", with the user's script and modules in it.
PYTHONS_FOLDER = sysconfig.get_path("stdlib")
KILL_LIMIT = 1.0  # seconds for a killed monitor to end


class MonitorProcess:
    """A monitor's process, and the channel to it."""

    def __init__(self, listener: socket.socket) -> None:
        """Start it. Raises: OSError."""
        self._channel, monitor_end = pair()
        fds = (monitor_end.fileno(), listener.fileno())
        try:
            with job_signals_blocked():
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-m", PROGRAM, *map(str, fds)],
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd=PYTHONS_FOLDER,
                    env=lean_environment(),
                    start_new_session=True,
                )
        except OSError:
            self._channel.close()
            raise
        finally:
            monitor_end.close()
        self.send(messages.OpenMonitor(os.getpid()))

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Return the channel's descriptor: readable if there is a message, or if the monitor is gone."""
        return self._channel.fileno()

    def send(self, message: messages.FromAgent, fds: Sequence[int] = ()) -> bool:
        """Send a message. Return False if the monitor does not read, or is gone.

        Limits that are too long are shortened, with a warning: else the worker would not be watched at all."""
        if isinstance(message, messages.WithLimits):
            message, left_out = messages.with_fitting_limits(message)
            if left_out:
                text = f"the limits of the ranks are too long for a message; left out: {left_out}; name fewer sections"
                warnings.warn(text, stacklevel=2)
        return self._channel.send(messages.encode(message), fds)

    def hear(self, wait: float) -> tuple[messages.ToAgent, list[int]] | None:
        """Return the monitor's next message with its descriptors, None if there is none within `wait` seconds.

        Raises: ChannelClosed."""
        received = self._channel.receive_with_fds(wait)
        if received is None:
            return None
        data, fds = received
        try:
            return messages.decode_for_agent(data), fds
        except DecodeError as error:  # the sender is not one of our monitors
            close_all(fds)
            raise ChannelClosed(str(error)) from error

    def has_ended(self, wait: float = 0.0) -> bool:
        """Return True if the process ends within `wait` seconds."""
        try:
            self._process.wait(wait)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it at once, even if it is stopped."""
        self._process.kill()
        self.has_ended(KILL_LIMIT)  # a process stuck in the kernel is left behind
        self._channel.close()

    def end(self, limit: float) -> None:
        """Let it finish; kill it after `limit` seconds."""
        self.send(messages.Leave())
        self.has_ended(limit)
        self.kill()


def lean_environment() -> dict[str, str]:
    """Return the environment for one of our programs started with -S: it finds this process's modules."""
    home = str(Path(resilience.__file__).resolve().parent.parent)
    paths = [home, *(os.path.abspath(path) for path in sys.path if path)]
    environment = os.environ.copy()  # passed on, not read
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environment["MALLOC_ARENA_MAX"] = "1"  # a second arena for its one thread would cost a megabyte
    return environment
